"""Weights on their way: packed without a copy, read back bit for bit, refused when damaged or not taken."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from nearpolicy.errors import EngineError
from nearpolicy.policy.loading import ALIGNMENT
from nearpolicy.sampler.publish import adopt_weights, check_held, load_parcel, pack, spot_digest


def travelled(parcel):
    """As another process gets it: its bytes in memory that cannot be written to."""
    buffers = []
    blob = pickle.dumps(parcel, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(blob, buffers=[bytes(b.raw()) for b in buffers])


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5))
def test_parcels_come_back_bit_for_bit(shapes):
    weights = {f"w{i}": torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.arange(int(np.prod(shape))).view(shape)
               for i, (dtype, shape) in enumerate(shapes)}  # fmt: skip
    parcel = travelled(pack(weights, 7))
    back = parcel.tensors()
    assert back.keys() == weights.keys()
    for name, value in weights.items():
        assert back[name].dtype == value.dtype
        assert torch.equal(back[name], value)
    assert spot_digest(back) == parcel.digest == spot_digest(weights)
    assert parcel.version == 7


def test_nothing_is_copied_and_tied_weights_travel_once():
    value = torch.randn(100, 10)
    parcel = pack({"a": value, "b": value, "transposed": value.t()}, 0)
    assert parcel.arrays["a"] is parcel.arrays["b"]
    assert parcel.arrays["a"].ctypes.data == value.data_ptr()
    assert torch.equal(parcel.tensors()["transposed"], value.t())
    assert parcel.size == 2 * 4000


def test_parcels_have_their_bytes_out_of_band():
    parcel = pack({"a": torch.randn(1000, 100)}, 0)
    buffers = []
    assert len(pickle.dumps(parcel, protocol=5, buffer_callback=buffers.append)) < 2000
    assert sum(memoryview(b).nbytes for b in buffers) == 400_000


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_003])
def test_the_digest_sees_a_trained_tensor(size):
    """An optimizer moves every value: the spots see it at any size."""
    value = torch.randn(size)
    assert spot_digest({"a": value}) != spot_digest({"a": value + 1e-6})
    assert spot_digest({"a": value}) != spot_digest({"b": value})
    assert spot_digest({"a": value}) == spot_digest({"a": value.clone()})


class Module:
    """A sampler with a model that can be looked at."""

    def __init__(self, dtype=torch.float32):
        self.model, self.version = torch.nn.Linear(3, 2).to(dtype), 0

    def adopt(self, weights, version):
        adopt_weights(self.model, weights)
        self.version = version


def published(version=1):
    return {"weight": torch.randn(2, 3), "bias": torch.randn(2)}, version


def test_adopted_weights_are_the_published_memory():
    sampler, (weights, version) = Module(), published()
    load_parcel(sampler, pack(weights, version))
    assert sampler.model.weight.data_ptr() == weights["weight"].data_ptr()
    assert sampler.version == 1


def test_weights_at_an_odd_address_are_copied():
    """Products with one row round otherwise there: a worker would not compute as the trainer does."""
    sampler, memory = Module(), torch.randn(64)
    weights = {"weight": memory[2:8].view(2, 3), "bias": memory[16:18]}
    load_parcel(sampler, pack(weights, 1))
    assert {value.data_ptr() % ALIGNMENT for value in sampler.model.parameters()} == {0}
    assert torch.equal(sampler.model.weight, weights["weight"])


def test_another_dtype_is_converted_into_fresh_memory():
    sampler, (weights, version) = Module(torch.bfloat16), published()
    before = sampler.model.weight.data.clone()
    held = sampler.model.weight.data
    load_parcel(sampler, pack(weights, version))
    assert torch.equal(sampler.model.weight, weights["weight"].bfloat16())
    assert torch.equal(held, before), "memory that may be another's was written to"


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"weight": torch.zeros(2, 3)}, "1 missing, first 'bias'"),
        ({"weight": torch.zeros(2, 3), "bias": torch.zeros(2), "x": torch.zeros(1)}, "1 unknown, first 'x'"),
        ({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, r"shape \(3, 2\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(weights, says):
    sampler = Module()
    before = sampler.model.weight
    with pytest.raises(EngineError, match=says):
        load_parcel(sampler, pack(weights, 1))
    assert sampler.version == 0
    assert torch.equal(sampler.model.weight, before)


def test_damaged_weights_are_refused():
    weights, version = published()
    parcel = pack(weights, version)
    weights["bias"] += 1  # a parcel is a view
    with pytest.raises(EngineError, match="weights of version 1: got other values than were published"):
        load_parcel(Module(), parcel)


def test_an_engine_that_keeps_its_version_is_refused():
    sampler = Module()
    sampler.adopt = lambda weights, version: None
    with pytest.raises(EngineError, match="version 0 after loading version 1"):
        load_parcel(sampler, pack(*published()))


def test_an_engine_that_keeps_old_weights_is_refused():
    sampler = Module()

    def adopt(weights, version):
        sampler.version = version

    sampler.adopt = adopt
    with pytest.raises(EngineError, match=r"other values in 'weight' than those of version 1.*kept old weights"):
        load_parcel(sampler, pack(*published()))


def test_engines_without_a_model_at_hand_check_for_themselves():
    check_held(object(), {"weight": torch.zeros(1)}, 1)


def test_a_parcel_knows_what_it_holds():
    parcel = pack(*published())
    assert replace(parcel, version=3).digest == parcel.digest
