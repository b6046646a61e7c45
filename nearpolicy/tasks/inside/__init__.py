"""What runs inside a sandbox. `nearpolicy.tasks.sandbox` sends these modules there, compiled, and starts the last of them.

    supervisor   holds the connection to the driver, keeps the clock, ends whatever a step leaves behind. Runs nothing foreign.
    program      the response, in a fork of the supervisor. Holds neither the connection nor any test; it starts before the tests arrive.
    judge        the tests' own code, in another fork. It calls the program over a pipe and is handed plain data only, so nothing in it runs
                 the program's code: objects that equal everything, patched builtins and printed verdicts are of no use.

Where the sandbox was started by root, program and judge have a user id each, and neither can signal or trace the other; elsewhere both are
the same user, and the system call filter is what forbids tracing.
"""
