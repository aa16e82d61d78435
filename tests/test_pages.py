"""Weights are moved to large pages of memory where the system has them; numbers stay."""

import mmap
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.kernels import pages
from specjax.models.model_folder import EMBEDDED

LARGE, SMALL = 1 << 25, mmap.PAGESIZE


def in_large_pages(address):
    """The bytes in large pages of the stretch of memory around an address, as Linux reports."""
    inside = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(x, 16) for x in first.split("-"))
            inside = begin <= address < end
        elif inside and first == "AnonHugePages:":
            return int(rest[0]) << 10
    return 0


def test_arrays_that_lie_side_by_side_are_one_stretch_and_small_ones_none():
    near = [(5 * LARGE + 64, LARGE), (4 * LARGE - 32, LARGE)]
    assert pages.stretches(near, LARGE) == [(4 * LARGE - SMALL, 6 * LARGE + SMALL)]
    far = [(LARGE + 2 * SMALL, LARGE), (3 * LARGE, LARGE)]
    assert pages.stretches(far, LARGE) == [(3 * LARGE, 4 * LARGE)]
    assert pages.stretches([], LARGE) == []


def test_a_large_array_is_moved_and_keeps_its_numbers_and_its_address():
    size = pages.large_page()
    if not size:
        pytest.skip("this system has no large pages")
    x = jnp.arange(2 * size, dtype=jnp.float32)  # eight large pages
    address = x.unsafe_buffer_pointer()
    moved = pages.collapse({"weight": x, "none": None, "host": np.ones(3)})
    if not moved:
        pytest.skip("this system moves nothing to large pages")
    assert in_large_pages(address) >= 7 * size and x.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(x, np.arange(2 * size, dtype=np.float32))


def test_small_arrays_lie_side_by_side_with_their_numbers_types_and_devices(monkeypatch):
    size = pages.large_page()
    if not size:
        pytest.skip("this system has no large pages")
    count = size // 4 + 5  # no whole cache lines of any type
    small = {
        "bfloat16": jax.device_put(jnp.arange(count, dtype=jnp.bfloat16), jax.devices("cpu")[0]),
        "float32": jnp.arange(count, dtype=jnp.float32).reshape(-1, 1),
        "int8": jnp.arange(count, dtype=jnp.int8),
        "none": jnp.zeros((0, 3)),
        "scalar": jnp.full((), 2.5, jnp.float16),
        "uint8": jnp.arange(count, dtype=jnp.uint8),
    }
    others = {
        "host": np.ones(3),
        "int4": jnp.arange(8, dtype=jnp.int4),
        "key": jax.random.key(0),
        "large": jnp.ones(pages.MANY * size // 4),
        "nothing": None,
        "weak": jnp.asarray(2.0),
    }
    found = pages.enlarge(small | others | {"again": small["int8"]})
    end = None
    for name, x in small.items():  # in the order in which JAX flattens them
        assert found[name].dtype == x.dtype and found[name].committed == x.committed
        np.testing.assert_array_equal(found[name], x)
    assert found["again"] is found["int8"]
    for name in ("int8", "bfloat16", "float32", "scalar", "uint8"):  # "again" is the first
        begin = found[name].unsafe_buffer_pointer()
        assert begin % pages.LINE == 0 and (end is None or 0 <= begin - end < pages.LINE), name
        end = begin + found[name].nbytes
    assert all(found[name] is x for name, x in others.items())

    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pages.mmap, "mmap", refuse)
    assert pages.enlarge(small)["int8"] is small["int8"]


def test_weights_that_are_loaded_lie_side_by_side():
    size = pages.large_page()
    if not size:
        pytest.skip("this system has no large pages")
    lm = specjax.load("embedded", tokenizer=False)
    head = specjax.load_drafter(EMBEDDED["embedded"].parent / "eagle3", lm).params
    for params in (lm.params, head):
        small = [x for x in jax.tree.leaves(params) if pages._is_small(x, pages.MANY * size)]
        places = sorted((x.unsafe_buffer_pointer(), x.nbytes) for x in small)
        ends = [begin + size for begin, size in places]
        gaps = [begin - end for (begin, _), end in zip(places[1:], ends, strict=False)]
        assert len(small) > 5 and all(0 <= gap < pages.LINE for gap in gaps)


def test_arrays_that_fill_no_large_page_stay():
    few = {"norm": jnp.ones(128), "bias": jnp.ones(128, jnp.bfloat16)}
    assert pages.enlarge(few)["norm"] is few["norm"]


def test_an_unknown_wish_for_pages_is_refused(monkeypatch):
    monkeypatch.setenv("SPECJAX_PAGES", "huge")
    with pytest.raises(ValueError, match="SPECJAX_PAGES='huge': it must be small"):
        pages.large_page()
    monkeypatch.setenv("SPECJAX_PAGES", "small")
    weights = {"weight": jnp.ones(1 << 20)}
    assert pages.large_page() == 0 == pages.collapse(weights)
    assert pages.enlarge(weights) is weights
