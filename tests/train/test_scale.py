"""On a mesh, in parts or rematerialised, a run computes what one device computes at once."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from specjax.train import evaluate, loop, outlook, scale, step
from specjax.train.config import ConfigError, RunConfig
from training_toys import JOBS, ROWS, STEPS, assert_same, text, trained

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@functools.cache
def alone(name):
    """On one device, the whole batch at once."""
    return trained(name, RunConfig())


def parts_of(tree, name):
    """The shapes of one device's parts of the arrays whose path ends in ``name``."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    ends = ((jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in flat)
    return {x.addressable_shards[0].data.shape for path, x in ends if path.endswith(name)}


MESHES = {
    "pretrain": ["data=8", "data=2,model=4", "model=8", "data=8 fully"],
    "unlikelihood": ["data=4,model=2"],  # which writes some of its rows
    "distill": ["data=2,model=4 fully"],
    "block": ["data=4,model=2"],  # which draws anchors, row by row
}


@pytest.mark.parametrize(
    ("name", "mesh"), [(name, mesh) for name, meshes in MESHES.items() for mesh in meshes]
)
def test_on_eight_devices_gradients_and_losses_are_those_of_one(name, mesh):
    mesh, _, fully = mesh.partition(" ")
    found = trained(name, RunConfig(mesh=mesh, fully_sharded=bool(fully)))
    assert_same(found, alone(name))


def test_weights_and_moments_are_split_over_both_axes():
    state = trained("pretrain", RunConfig(mesh="data=2,model=4", fully_sharded=True), 1)["state"]
    for tree in (state["params"], state["optimizer"]["rest"]):
        assert parts_of(tree, "mlp.up.weight") == {(32 // 4, 16 // 2)}
        assert parts_of(tree, "lm_head.weight") == {(32 // 4, 16 // 2)}
        assert parts_of(tree, "mlp_norm.weight") == {(16,)}
    state = trained("pretrain", RunConfig(mesh="data=2,model=4"), 1)["state"]
    assert parts_of(state, "mlp.up.weight") == {(32 // 4, 16)}


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("pretrain", RunConfig(accumulate=4)),
        ("block", RunConfig(accumulate=4)),  # a part draws what its rows would in the whole
        # each part has other positions that count
        ("eagle3", RunConfig(accumulate=2, remat=True, mesh="data=4,model=2")),
    ],
)
def test_in_parts_and_rematerialised_gradients_and_losses_are_the_same(name, run):
    assert_same(trained(name, run), alone(name))


def test_means_are_over_the_whole_batch_however_unevenly_its_parts_count():
    weights = jnp.asarray([[1.0, 0, 0], [1, 1, 1]])  # a part each
    values = jnp.asarray([[4.0, 9, 9], [1, 2, 5]])

    def loss(slope, frozen, rows, key):
        return {"loss": evaluate.mean(slope * rows["values"], rows["weights"])}

    task = step.TrainingTask(loss, jnp.float32(1), None, None)
    for accumulate in (1, 2):
        rows = {"values": values, "weights": weights}
        given = jnp.float32(1), None, rows, jax.random.key(0), jnp.arange(2)
        (value, _), slope = step.make_gradients(task, RunConfig(accumulate=accumulate))(*given)
        assert value == slope == (4 + 1 + 2 + 5) / 4


@pytest.mark.parametrize("name", ["pretrain", "distill", "eagle3"])
def test_rematerialised_a_step_keeps_a_fraction_for_the_way_back(name):
    task, rows = JOBS[name](), text()[0]

    def kept(run):
        """Bytes between the way there and the way back, as the program is written."""
        loss = step.make_loss(task, run)

        def forth(params):
            value = lambda p: loss(p, task.frozen, rows, None)[0]  # noqa: E731
            return jax.vjp(value, params)[1]

        held = jax.tree.leaves(jax.eval_shape(forth, task.params))
        return sum(x.size * x.dtype.itemsize for x in held)

    assert kept(RunConfig(remat=True)) < 0.25 * kept(RunConfig())


def test_in_bfloat16_masters_and_moments_stay_float32_and_learn_as_well():
    found = trained("pretrain", RunConfig(precision="bfloat16"))
    state, wanted = found["state"], alone("pretrain")["losses"]
    kinds = {x.dtype for x in jax.tree.leaves((state["params"], state["optimizer"]))}
    assert kinds == {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert found["losses"] != wanted
    np.testing.assert_allclose(found["losses"], wanted, rtol=0.01)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (dict(mesh="data=16"), "run.mesh='data=16' needs 16 devices, there are 8"),
        (dict(mesh="rows=2"), "run.the mesh has axes"),
        (dict(mesh="data=3"), "data.batch=16 cannot be shared evenly by data=3 devices"),
        (dict(accumulate=5), "run.accumulate=5 parts: give a multiple of 5"),
        (dict(mesh="data=4", accumulate=8), "give a multiple of 32"),
        (dict(fully_sharded=True), "splits weights over the axis data, which run.mesh=''"),
    ],
)
def test_what_cannot_be_shared_is_refused_before_anything_runs(run, message, tmp_path):
    run = RunConfig(folder=str(tmp_path / "run"), steps=STEPS, **run)
    with pytest.raises(ConfigError, match=message):
        loop.fit(None, {"data.batch": ROWS}, None, run)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=message):
        scale.layout_of(run, ROWS)


def mesh_of(processes):
    """A mesh as ``host_share`` reads it, given the process of each device ``[data, model]``."""
    devices = np.vectorize(lambda i: types.SimpleNamespace(process_index=i))(np.array(processes))
    shape = dict(zip(("data", "model"), devices.shape, strict=True))
    return types.SimpleNamespace(devices=devices, shape=shape)


@pytest.mark.parametrize(
    ("processes", "numbers"),
    [
        ([[0], [0], [1], [1]], [0, 2, 4, 6, 1, 3, 5, 7]),
        ([[0, 1], [2, 3]], [0, 2, 4, 6, 1, 3, 5, 7]),  # two of them share each part
        ([[0], [1], [0], [1]], [0, 2, 1, 3, 4, 6, 5, 7]),
        ([[0, 0], [0, 0]], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_rows_number_is_that_of_the_batch_as_one_process_reads_it(processes, numbers):
    mesh = mesh_of(processes)
    assert scale.MeshLayout(mesh).index(8).tolist() == numbers
    # each part's rows, one after the other where they lie, are rows ``i::count`` of that batch
    held = scale._parts(mesh)
    blocks = np.split(np.array(numbers), len(processes))
    for i, part in enumerate(held):
        own = np.concatenate([blocks[block] for block in part])
        assert own.tolist() == list(range(i, 8, len(held)))


@pytest.mark.parametrize("processes", [[[0, 0, 0], [0, 1, 1], [1, 1, 1]], [[0], [1], [1]]])
def test_processes_whose_rows_overlap_or_are_unlike_are_refused_in_words(processes):
    shape = f"data=3,model={len(processes[0])}"
    with pytest.raises(ConfigError, match=f"{shape}.* of 2 processes .* give an axis model"):
        scale.host_share(mesh_of(processes))


def test_the_estimate_counts_the_bytes_of_one_device():
    layout = scale.layout_of(RunConfig(mesh="data=2,model=4"))
    whole = {"mlp": {"up": {"weight": jnp.ones((32, 16))}}, "norm": {"weight": jnp.ones(16)}}
    assert outlook.bytes_a_device(whole) == outlook.num_bytes(whole) == 4 * (32 * 16 + 16)
    assert outlook.bytes_a_device(layout.place(whole)) == 4 * (32 * 16 // 4 + 16)
