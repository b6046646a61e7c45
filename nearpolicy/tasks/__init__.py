"""Tasks: prompts and how responses to them are rewarded.

`rows` (rows from files), `reasoning_gym`, `arithmetic` (the embedded task); `render` (row -> token ids), `order` (which row comes next);
`functions` and `verifiers` (reward functions), `pool` and `worker` (the processes they run in). Import from the modules: reward workers
load parts of this package without torch.
"""
