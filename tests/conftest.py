"""Devices, the cache of compiled programs, and tiers: see ``tests/README.md``."""

import concurrent.futures
import gc
import itertools
import os
import pathlib
import tempfile

import jax
import pytest
import tiers
from quickly import compiling_quickly
from tier_table import DEFAULT, FULL, TIERS

from specjax.kernels.cpu import library
from specjax.kernels.xla_cpu import THREADS_PER_DEVICE

# A test sees one device, as a user's program does. Tests of several devices have their own session.
DEVICES = int(os.environ.get("SPECJAX_TEST_DEVICES", "1"))
if DEVICES > 1:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    os.environ.setdefault("NPROC", str(DEVICES * THREADS_PER_DEVICE))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
HERE = pathlib.Path(__file__).parent
MANY, OFTEN = 30_000, 16  # mappings of memory; tests between two checks of their number
ended = itertools.count()
schedule = pytest.StashKey[tiers.Schedule]()


def pytest_addoption(parser):
    parser.addoption(
        "--tier",
        help=f"run the tests of these tiers alone ({', '.join(TIERS)}; several with commas). "
        "Default: the default tier; of a file that is named, every test",
    )
    parser.addoption("--fuzz-seconds", type=float, default=300, help="how long fuzz/ tries")
    parser.addoption("--fuzz-seed", type=int, default=0, help="decides what fuzz/ tries")
    parser.addoption("--fuzz-case", type=int, help="the only case of that seed to try")
    parser.addoption("--fuzz-drop", default="", help="choices of that case to leave out")
    parser.addoption("--fuzz-quick", action="store_true", help="compile with few optimizations")


def pytest_configure(config):
    config.stash[schedule] = tiers.Schedule()
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the environment
        keep_programs(config)
        if getattr(config.option, "numprocesses", None) and DEVICES == 1:
            compile_kernels()
    place = os.environ["JAX_COMPILATION_CACHE_DIR"]
    jax.config.update("jax_compilation_cache_dir", place)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    gc.set_threshold(20_000)  # tracing makes many objects of which few are in cycles


def keep_programs(config):
    """Keeps compiled programs in pytest's own cache.

    The workers of a run, the processes that tests start, and later runs of this checkout share it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    if hasattr(config, "cache"):
        place = str(config.cache.mkdir("specjax-programs"))
    else:  # -p no:cacheprovider
        config.add_cleanup((folder := tempfile.TemporaryDirectory()).cleanup)
        place = folder.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = place
    config.add_cleanup(lambda: os.environ.pop("JAX_COMPILATION_CACHE_DIR"))


def compile_kernels():
    """Compiles the two largest libraries of kernels side by side, where they are not there yet.

    Otherwise all workers would compile them, at the same time.
    """
    needed = [name for name in ("kernels", "quantized") if not library.prebuilt(name)]
    if needed and os.environ.get("SPECJAX_NATIVE") != "never":
        with concurrent.futures.ThreadPoolExecutor() as threads:
            list(threads.map(library._native, needed))  # a problem is named where it is met


def wanted(config):
    """The tiers to run; None: every test of the named files."""
    if chosen := config.getoption("--tier"):
        names = [x.strip() for x in chosen.split(",")]
        if unknown := set(names) - {*TIERS}:
            raise pytest.UsageError(f"--tier {unknown.pop()!r}: known are {', '.join(TIERS)}")
        return names
    named = [pathlib.Path(str(x).split("::")[0]) for x in config.args]
    return None if any(x.suffix == ".py" for x in named) else [DEFAULT]


def below(path):
    """``path`` relative to ``tests/``, as in the table of tiers."""
    return pathlib.Path(path).relative_to(HERE).as_posix()


def pytest_ignore_collect(collection_path, config):
    """Files without a test of the wanted tiers are not even imported."""
    if collection_path.suffix != ".py" or not collection_path.is_relative_to(HERE):
        return None
    names, table = wanted(config), config.stash[schedule]
    file = below(collection_path)
    if names is None:
        return None
    repeated = FULL in names and file.startswith(tiers.REPEATED)
    several = DEVICES > 1 and not (file in table.devices or repeated)
    return True if several or not table.tiers(file) & {*names} else None


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Compiles quickly what modules compute at their import."""
    with compiling_quickly():
        return (yield)


def pytest_collection_modifyitems(config, items):
    names, table = wanted(config), config.stash[schedule]
    kept, dropped = [], []
    for item in items:
        file, test = below(item.path), item.nodeid.partition("::")[2]
        tier, many = table.tier(file, test), table.many(file, test)
        if many and DEVICES == 1 and names is None:
            item.add_marker(pytest.mark.skip(reason="needs SPECJAX_TEST_DEVICES=8"))
        repeated = names and FULL in names and file.startswith(tiers.REPEATED)
        here = many == (DEVICES > 1) or DEVICES > 1 and repeated
        run = names is None or tier in names and here
        (kept if run else dropped).append(item)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Has one worker run all tests of a group, unless another way to distribute them is asked for.

    The marks that pytest-xdist has for groups do nothing with pytest 9.2: pytest-xdist 3.8 adds the
    groups to names of tests that are not read any more.
    """
    from xdist.scheduler import LoadScopeScheduling

    if config.getvalue("dist") != "load":
        return None

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            place, _, test = nodeid.partition("::")
            file = below(config.rootpath / place)
            return config.stash[schedule].group(file, test) or nodeid

    return ByGroup(config, log)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Drops compiled programs when there are thousands of them.

    Each program maps memory a few times. Linux allows 65,530 mappings for each process; beyond them
    a compilation fails or ends the process.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if next(ended) % OFTEN == 0 and maps.exists() and maps.read_bytes().count(b"\n") > MANY:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def quick_compilation():
    with compiling_quickly():
        yield


@pytest.fixture(scope="session")
def hurried(request):
    """Whether the default or the merge tier runs, and neither the full tier nor named files."""
    names = wanted(request.config)
    return bool(names) and FULL not in names


@pytest.fixture(autouse=True, scope="module")
def compilation_of_the_tier(request, hurried):
    """Compiles the files of ``tiers.QUICK`` quickly in the default tier and the merge tier."""
    if (file := below(request.path)) in tiers.QUICK and hurried:
        with compiling_quickly(optimized=file in tiers.OPTIMIZED):
            yield
    else:
        yield


@pytest.fixture
def misplaced(request):
    """Tests of the files that were collected which need several devices, in the default tier."""
    return request.config.stash[schedule].misplaced


@pytest.fixture
def unmatched(request):
    """Lines of the table of tiers that match no test of the files that were collected."""
    return request.config.stash[schedule].unused()


@pytest.fixture
def one_trace(monkeypatch):
    """Fails a test in which ``specjax.decode`` is traced for the second time."""
    import chex

    from specjax.decoding import loop, prefill

    chex.clear_trace_counter()
    # every trace begins with the prompts
    monkeypatch.setattr(loop, "start", chex.assert_max_traces(prefill.start, n=1))
