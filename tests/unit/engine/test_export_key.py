"""The key of an export on disk: each thing that a trace can depend on changes it, and nothing else does."""

from __future__ import annotations

import ast
import importlib
import itertools
import shutil
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import ortlab
from ortlab.engine.disk_cache import Uncovered, installed_code
from ortlab.engine.disk_cache import cache as export_key
from ortlab.engine.disk_cache.cache import export_key as key_of
from ortlab.options.options import Options

pytestmark = pytest.mark.row("C6", "T11")

CELL = """
import math
import torch
from torch import nn

SCALE = 2.0
TABLE = {"first": [1, 2]}

def helper(x):
    return x * SCALE

def with_constant(k):
    def inner(x):
        return x + k
    return inner

def never_called(x):
    return x - 7

class Settings:
    unit = 1
    def __init__(self):
        self.factor = 3
    def apply(self, x):
        return x * self.unit

class Base(nn.Module):
    def prepare(self, x):
        return x.relu()
    def forward(self, x):
        raise NotImplementedError

class Net(Base):
    slope = 0.5
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.1)
        self.settings = Settings()
        self.add = with_constant(1)
        self.register_buffer("mask", torch.ones(4), persistent=False)
        self.register_buffer("seen", torch.zeros(4))
        self.offset = torch.zeros(4)
        self.names = ["a", "b"]
    @property
    def shift(self):
        return math.pi
    def unused(self, x):
        return x * 5
    def forward(self, x, flag=True):
        x = self.prepare(helper(self.drop(self.linear(x))))
        if flag:
            x = self.add(x) * self.slope + self.shift
        x = [part * 2 for part in (x, x)][0] * TABLE["first"][1]
        return self.settings.apply(x) * self.mask + self.offset
"""

SHORT = """
import torch
from torch import nn
{above}
class Net(nn.Module):
    def forward(self, x):
        {line}
        return x
"""

numbers = itertools.count()


def net(source=CELL):
    """Make the network as a cell of a notebook does: another file name each time, the module `__main__`."""
    names = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(source, f"<ipython-input-{next(numbers)}>", "exec"), names)  # noqa: S102
    torch.manual_seed(0)
    return names["Net"]()


def batch(rows=2):
    return torch.ones(rows, 4)


def key(module=None, *args, options=None, **kwargs):
    return key_of(module or net(), args or (batch(),), kwargs, options or Options())


# ---- what leaves it as it is ---------------------------------------------------------------------------------------


def test_the_same_cell_in_another_kernel_has_the_same_key():
    assert key() == key(net("\n\n# moved down, with a comment\n" + CELL))


def test_trained_weights_and_statistics_leave_the_key_as_it_is():
    module = net()
    before = key(module)
    with torch.no_grad():
        module.linear.weight.add_(1)
        module.seen.add_(1)
    assert key(module) == before


def test_code_that_the_forward_does_not_reach_leaves_the_key_as_it_is():
    assert key(net(CELL.replace("x - 7", "x - 8").replace("x * 5", "x * 6"))) == key()


def test_a_wrapped_module_has_the_key_of_the_plain_one(wrap):
    module = net()
    before = key(module)
    wrap(module)
    assert key(module) == before


def test_an_attribute_of_unknown_kind_that_no_code_names_is_left_out():
    module = net()
    module.lock = threading.Lock()
    assert key(module) == key(module)


# ---- code ----------------------------------------------------------------------------------------------------------

CODE = {
    "the forward": ("* self.mask", "- self.mask"),
    "a helper": ("x * SCALE", "x / SCALE"),
    "a global": ("SCALE = 2.0", "SCALE = 2.5"),
    "a nested global": ("[1, 2]", "[1, 3]"),
    "a closure": ("with_constant(1)", "with_constant(2)"),
    "a function in a function": ("return x + k", "return x - k"),
    "a default": ("flag=True", "flag=False"),
    "a comprehension": ("part * 2", "part * 3"),
    "a class attribute": ("slope = 0.5", "slope = 0.6"),
    "an inherited method": ("x.relu()", "x.sigmoid()"),
    "a property": ("math.pi", "math.e"),
    "a method of another class": ("return x * self.unit", "return x / self.unit"),
    "an attribute of another class": ("unit = 1", "unit = 2"),
    "a value in an object": ("self.factor = 3", "self.factor = 4"),
    "a number of a layer": ("Dropout(0.1)", "Dropout(0.2)"),
    "the kind of a layer": ("nn.Dropout(0.1)", "nn.AlphaDropout(0.1)"),
    "a list": ('["a", "b"]', '["a", "c"]'),
    "a plain tensor": ("self.offset = torch.zeros(4)", "self.offset = torch.ones(4)"),
    "a buffer outside state_dict": ('"mask", torch.ones(4)', '"mask", torch.zeros(4)'),
    "a buffer's persistence": ('"seen", torch.zeros(4)', '"seen", torch.zeros(4), persistent=False'),
    "a layer's name": ("self.linear", "self.dense"),
    "a size": ("nn.Linear(4, 4)", "nn.Linear(4, 1)"),
}


@pytest.mark.parametrize("change", CODE)
def test_code_and_what_it_refers_to_are_in_the_key(change):
    old, new = CODE[change]
    changed = CELL.replace(old, new)
    assert changed != CELL
    ast.parse(changed)
    assert key(net(changed)) != key()


# ---- the module ----------------------------------------------------------------------------------------------------


def freeze(module):
    module.linear.weight.requires_grad_(False)


def tie(module):
    module.linear.bias = module.linear.bias
    module.second = module.linear


def hook(module):
    module.linear.register_forward_hook(lambda _module, _args, output: output * 2)


STATE = {
    "eval": lambda module: module.eval(),
    "one part in eval": lambda module: module.drop.eval(),
    "a probability": lambda module: setattr(module.drop, "p", 0.5),
    "a frozen parameter": freeze,
    "a dtype": lambda module: module.double(),
    "a part twice": tie,
    "a hook of a part": hook,
    "a method of its own": lambda module: setattr(module.linear, "forward", lambda x: x),
    "no bias": lambda module: module.linear.register_parameter("bias", None),
    "an attribute": lambda module: setattr(module.settings, "unit", 4),
    "strides": lambda module: setattr(
        module.linear, "weight", nn.Parameter(module.linear.weight.detach().t().contiguous().t())
    ),
}


@pytest.mark.parametrize("change", STATE)
def test_the_state_of_the_module_is_in_the_key(change):
    module = net()
    before = key(module)
    STATE[change](module)
    assert key(module) != before


def test_tied_weights_are_in_the_key():
    pair = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = key(pair)
    pair[1].weight = pair[0].weight
    assert key(pair) != before


# ---- the call ------------------------------------------------------------------------------------------------------

CALLS = {
    "another size": ((batch(3),), {}),
    "another dtype": ((batch().double(),), {}),
    "another rank": ((batch()[None],), {}),
    "requires grad": ((batch().requires_grad_(),), {}),
    "strides": ((torch.ones(4, 2).t(),), {}),
    "by name": ((), {"x": batch()}),
    "a flag": ((batch(), False), {}),
    "a flag by name": ((batch(),), {"flag": False}),
}


@pytest.mark.parametrize("call", CALLS)
def test_the_call_is_in_the_key(call):
    args, kwargs = CALLS[call]
    assert key_of(net(), args, kwargs, Options()) != key()


def test_values_of_a_batch_are_not_in_the_key():
    assert key(None, batch() * 3) == key()


# ---- switches and surroundings -------------------------------------------------------------------------------------

OPTIONS = (
    {"opset": 16},
    {"custom_autograd": False},
    {"allow_autograd_checkpoint": True},
    {"deepcopy_before_export": False},
    {"symbolic_shape_inference": False},
    {"aten_cross_entropy": not Options().aten_cross_entropy},
    {"aten_recurrent": False},
    {"chunked_loss": True},
    {"label_sparse_optimizer": False},
    {"embedding_sparse_optimizer": False},
    {"compute_optimizer": False},
    {"memory_level": 1},
)


@pytest.mark.parametrize("changes", OPTIONS, ids=lambda changes: next(iter(changes)))
def test_switches_that_act_on_an_export_are_in_the_key(changes):
    assert key(options=Options().replace(**changes)) != key()


def test_switches_that_act_later_are_not_in_the_key(tmp_path):
    later = Options().replace(memory_level=2, export_cache_dir=tmp_path, log_level="INFO")
    assert key(options=later) == key()


def test_torchs_settings_are_in_the_key(monkeypatch):
    module = net()
    keys = {key(module)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.add(key(module))
    with torch.no_grad():
        keys.add(key(module))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        keys.add(key(module))
    torch.set_default_dtype(torch.float64)
    try:
        keys.add(key(module))
    finally:
        torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(mode=True)
    try:
        keys.add(key(module))
    finally:
        torch.use_deterministic_algorithms(mode=False)
    monkeypatch.setenv("TRANSFORMERS_ATTENTION", "another")
    keys.add(key(module))
    assert len(keys) == 7


def test_hooks_of_all_modules_are_in_the_key():
    module = net()
    before = key(module)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert key(module) != before
    finally:
        handle.remove()


@pytest.mark.parametrize("package", ["torch", "onnx", "onnxruntime-training-cpu"])
def test_versions_are_in_the_key(package, monkeypatch):
    module = net()
    before = key(module)
    installed = export_key.versions()
    name = next(one for one in installed if one.startswith(package.partition("-")[0]))
    monkeypatch.setattr(export_key, "versions", lambda: {**installed, name: "0.0"})
    assert key(module) != before


def test_torchs_own_version_text_is_in_the_key(monkeypatch):
    module = net()
    before = key(module)
    monkeypatch.setattr(torch, "__version__", torch.__version__ + "+other")
    assert key(module) != before


def test_the_engines_files_are_in_the_key(monkeypatch, tmp_path):
    engine = Path(ortlab.__file__).parent / "engine"
    shutil.copytree(engine, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(export_key, "_folder", lambda: tmp_path)
    digest = export_key.engine_digest.__wrapped__
    before = digest()
    assert before == export_key.engine_digest()
    (tmp_path / "operators" / "symbolics.py").write_text("# another translation\n")
    assert digest() != before


# ---- installed code ------------------------------------------------------------------------------------------------


def test_a_function_that_somebody_put_into_torch_is_in_the_key(monkeypatch):
    module = net()
    keys = {key(module)}
    monkeypatch.setattr(nn.functional, "linear", lambda x, *_: x * 2)
    keys.add(key(module))
    monkeypatch.setattr(nn.functional, "linear", lambda x, *_: x * 3)
    keys.add(key(module))
    monkeypatch.undo()
    monkeypatch.setattr(torch.Tensor, "relu", lambda x: x * 4)
    keys.add(key(module))
    assert len(keys) == 4


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that installs a package of two modules, one of which imports from the other."""
    folders = installed_code._package_folders()
    monkeypatch.setattr(installed_code, "_package_folders", lambda: (str(tmp_path), *folders))
    installed_code.origin_of_file.cache_clear()
    monkeypatch.syspath_prepend(tmp_path)

    def install(factor, registry="{}"):
        package = tmp_path / "layers_of_others"
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "inner.py").write_text(f"def scaled(x):\n    return x * {factor}  # {'-' * factor}\n")
        (package / "outer.py").write_text(
            "from torch import nn\n"
            "from layers_of_others.inner import scaled\n"
            "class Registry:\n"
            "    table = {}\n"
            "REGISTRY = Registry()\n"
            "class Scale(nn.Module):\n"
            "    def forward(self, x):\n"
            "        return scaled(x)\n"
        )
        for name in [name for name in sys.modules if name.startswith("layers_of_others")]:
            del sys.modules[name]
        importlib.invalidate_caches()
        return importlib.import_module("layers_of_others.outer")

    yield install
    for name in [name for name in sys.modules if name.startswith("layers_of_others")]:
        del sys.modules[name]
    installed_code.origin_of_file.cache_clear()


def test_an_installed_file_that_was_edited_in_place_is_in_the_key(installed):
    before = key(installed(2).Scale())
    assert key(installed(2).Scale()) == before
    assert key(installed(3).Scale()) != before


def test_functions_in_a_registry_of_an_installed_package_are_in_the_key(installed):
    module = installed(2)
    before = key(module.Scale())
    module.REGISTRY.table["mine"] = lambda x: x * 3
    first = key(module.Scale())
    module.REGISTRY.table["mine"] = lambda x: x * 4
    assert len({before, first, key(module.Scale())}) == 3


def test_packages_of_another_installation_on_the_path_are_installed(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(installed_code, "_package_folders", installed_code._package_folders.__wrapped__)
    assert installed_code.origin_of_file(str(folder / "layers_of_others" / "scale.py")) == "layers_of_others"
    assert not installed_code.origin_of_file(str(tmp_path / "scale.py"))


def test_attention_that_somebody_registered_with_transformers_is_in_the_key():
    from transformers import AttentionInterface, BertConfig, BertModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=11, **sizes))
    ids = torch.ones(1, 3, dtype=torch.int64)
    keys = {key(model, ids)}
    try:
        for factor in (2, 3):
            AttentionInterface.register("mine", eval(f"lambda *a, **k: {factor}"))  # noqa: S307
            keys.add(key(model, ids))
    finally:
        AttentionInterface._global_mapping.pop("mine", None)
    assert len(keys) == 3


def test_a_config_of_transformers_is_in_the_key():
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=1))
    ids = torch.ones(1, 3, dtype=torch.int64)
    before = key(model, ids)
    model.config.scale_attn_weights = False
    assert key(model, ids) != before


# ---- what no key can cover -----------------------------------------------------------------------------------------


class Opaque:
    """An object whose attributes Python does not show."""

    __slots__ = ()


SAMPLES = {
    "os.environ": ("import os", 'x * float(os.environ.get("FACTOR", 1))', "module os"),
    "the clock": ("import time", "x * time.time()", "module time"),
    "a name of the clock": ("from time import time", "x * time()", "module time"),
    "random": ("import random", "x * random.random()", "module random"),
    "an import inside": ("", "__import__('os').environ and x", "__import__"),
    "numpy's random numbers": ("import numpy as np", "x * np.random.rand()", "random numbers of numpy"),
    "a file": ("", "x * float(open('factor').read())", "`open`"),
    "id": ("", "x * id(x)", "`id`"),
    "an operator of somebody else": ("", "torch.ops.mine.scale(x)", "mine"),
    "a set of objects": ("SET = {object(), 1.5}", "x * len(SET)", "SET"),
}


@pytest.mark.parametrize("what", SAMPLES)
def test_code_that_no_key_covers_is_named(what):
    above, expression, thing = SAMPLES[what]
    source = SHORT.format(above=above, line=f"x = {expression}")
    with pytest.raises(Uncovered) as caught:
        key(net(source))
    assert thing in caught.value.thing


OBJECTS = {
    "a lock": threading.Lock(),
    "a generator of numpy": np.random.default_rng(1),
    "a generator of torch": torch.Generator(),
    "an object without attributes": Opaque(),
    "an iterator": iter(()),
    "a sparse tensor": torch.ones(2, 2).to_sparse(),
}


@pytest.mark.parametrize("what", OBJECTS)
def test_an_object_that_no_key_covers_is_named_when_the_code_uses_it(what):
    module = net(CELL.replace("* self.mask", "* (self.strange is not None)"))
    module.strange = OBJECTS[what]
    with pytest.raises(Uncovered, match=r"strange"):
        key(module)


def test_an_object_that_the_code_may_reach_by_any_name_is_refused():
    module = net(CELL.replace("* self.mask", "* getattr(self, 'ma' + 'sk')"))
    module.strange = threading.Lock()
    with pytest.raises(Uncovered, match=r"strange"):
        key(module)


def test_losses_whose_labels_choose_the_graph_are_named_with_the_way_out():
    module = nn.ModuleDict({"loss": nn.CrossEntropyLoss()})
    with pytest.raises(Uncovered, match=r"loss.*label_sparse_optimizer=False"):
        key(module)
    assert key(module, options=Options().replace(label_sparse_optimizer=False))


def test_an_active_mode_is_refused():
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Doubled(), pytest.raises(Uncovered, match="TorchFunctionMode"):
        key()


def test_a_module_that_the_forward_would_import_is_refused():
    name = "a_module_that_is_not_loaded"
    source = SHORT.format(above="", line=f"import {name}")
    with pytest.raises(Uncovered, match=name):
        key(net(source))


def test_a_module_of_the_user_is_described_by_the_members_that_are_named(monkeypatch):
    mine = types.ModuleType("mine_for_this_test")
    exec("def used(x):\n    return x * 2\ndef unused(x):\n    return x * 3\n", vars(mine))  # noqa: S102
    monkeypatch.setitem(sys.modules, mine.__name__, mine)
    source = SHORT.format(above=f"import {mine.__name__} as mine", line="x = mine.used(x)")
    before = key(net(source))
    exec("def unused(x):\n    return x * 4\n", vars(mine))  # noqa: S102
    assert key(net(source)) == before
    exec("def used(x):\n    return x * 4\n", vars(mine))  # noqa: S102
    assert key(net(source)) != before
