"""Shapes are checked by jaxtyping and beartype under pytest only."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jaxtyping import install_import_hook

_HOOK = install_import_hook(["nearpolicy.objective", "nearpolicy.methods"], "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402

# What `dtype = "auto"` means must not depend on the machine that runs the tests; those of bfloat16 ask for it.
torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False


@pytest.fixture(autouse=True)
def _one_thread_and_seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)
