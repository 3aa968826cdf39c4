"""What may stand behind a magic: words, quotes, lists, `$name`; and that nothing is evaluated."""

from __future__ import annotations

import pytest

from ortlab.errors import ArgumentError, OptionError
from ortlab.notebook.magics import arguments, command


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", []),
        ("  model   log_level=INFO ", ["model", "log_level=INFO"]),
        ('"two words" x', ["two words", "x"]),
        ("'it''s' one", ["its", "one"]),
        (r'"say \"hi\""', ['say "hi"']),
        ("a='two words' b", ["a='two words'", "b"]),
        ("plans=['a', 'b'] n", ["plans=['a', 'b']", "n"]),
        ("plans=('a', 'b')", ["plans=('a', 'b')"]),
        ("größe=1", ["größe=1"]),
        ("--save=a/b.onnx", ["--save=a/b.onnx"]),
        ("model   # what trains, isn't it [really", ["model"]),
        ("# all of them", []),
        ("a#b runs/#3 -n 2", ["a#b", "runs/#3", "-n", "2"]),
        ("path='a # b' # c", ["path='a # b'"]),
        ("plans=['a', # 'b'\\n] n", ["plans=['a', # 'b'\\n]", "n"]),
        ("plans=[['a', 'b'], []] n", ["plans=[['a', 'b'], []]", "n"]),
        (r"'it\'s # here' x", ["it's # here", "x"]),
        ("run(1).log :) x", ["run(1).log", ":)", "x"]),
    ],
)
def test_words(line, expected):
    assert arguments.words(line) == expected


@pytest.mark.parametrize("line", ['"open', "a='open", "it's"])
def test_an_open_quotation_is_refused(line):
    with pytest.raises(ArgumentError, match="quotation does not end"):
        arguments.words(line)


@pytest.mark.parametrize("line", ["plans=['a', 'b'", "f(x", "[[1]"])
def test_an_open_bracket_is_refused(line):
    with pytest.raises(ArgumentError, match="bracket is not closed"):
        arguments.words(line)


@pytest.mark.parametrize(
    ("pair", "expected"),
    [
        ("memory_level=1", {"memory_level": "1"}),
        ("log_level=INFO", {"log_level": "INFO"}),
        ("engine=eager", {"engine": "eager"}),
        ("save_onnx_path='my graphs'", {"save_onnx_path": "my graphs"}),
        ('save_onnx_path="my graphs"/deep', {"save_onnx_path": "my graphs/deep"}),
        ("save_onnx_path=a=b", {"save_onnx_path": "a=b"}),
        ("save_onnx_path=", {"save_onnx_path": ""}),
        ("memory_plan=['Gelu+:1:-1', 'Cast+:1:-1']", {"memory_plan": ["Gelu+:1:-1", "Cast+:1:-1"]}),
        ("memory_plan=Gelu+:1:-1,Cast+:1:-1", {"memory_plan": "Gelu+:1:-1,Cast+:1:-1"}),
        ("memory_level=$level", {"memory_level": 2}),
        ("save_onnx_path=$trainer.folder", {"save_onnx_path": "runs"}),
    ],
)
def test_changes(pair, expected):
    trainer = type("Trainer", (), {"folder": "runs"})()
    assert arguments.changes([pair], {"level": 2, "trainer": trainer}) == expected


def test_a_bare_word_is_never_a_variable():
    assert arguments.changes(["log_level=INFO"], {"INFO": "surprise"}) == {"log_level": "INFO"}


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("memory_level", "is not option=value"),
        ("memory level=1", "is not option=value"),
        ("memory_level=$leval", r"no variable 'leval'.*\n.*Did you mean 'level'"),
        ("memory_level=$level+1", "evaluates no expressions"),
        ("memory_level=$f()", "evaluates no expressions"),
        ("memory_plan=[open('x')]", "not a list of literals"),
        ("memory_plan=[level]", "not a list of literals"),
        ("save_onnx_path=$level.nothing", "no attribute 'nothing'"),
    ],
)
def test_changes_that_are_refused(pair, said):
    with pytest.raises(ArgumentError, match=f"(?s){said}"):
        arguments.changes([pair], {"level": 2})


def test_an_unknown_option_suggests_the_near_one():
    with pytest.raises(OptionError, match="memory_level"):
        arguments.changes(["memory_levle=1"], {})


@pytest.mark.parametrize("name", ["options", "name", "module", "self"])
def test_names_that_python_gives_a_meaning_are_no_options(name):
    with pytest.raises(OptionError, match=f"no option '{name}'"):
        arguments.changes([f"{name}=1"], {})


def test_an_option_given_twice_is_refused():
    with pytest.raises(ArgumentError, match="memory_level is given twice"):
        arguments.changes(["memory_level=1", "memory_level=2"], {})


@pytest.mark.parametrize(("text", "expected"), [("20", 20), ("-3", -3), ("$n", 7)])
def test_number(text, expected):
    assert arguments.number(text, {"n": 7}, "-n") == expected


@pytest.mark.parametrize("text", ["", "many", "1.5", "1e3", "$yes", "$word", "[1]"])
def test_what_is_not_a_whole_number_is_refused(text):
    with pytest.raises(ArgumentError, match="-n takes a whole number"):
        arguments.number(text, {"yes": True, "word": "seven"}, "-n")


def test_path(tmp_path):
    assert arguments.path("a b.onnx", {}) == "a b.onnx"
    assert arguments.path("$target", {"target": tmp_path}) == str(tmp_path)
    with pytest.raises(ArgumentError, match="holds a int, not the path"):
        arguments.path("$target", {"target": 3})


def test_variable_suggests_only_what_fits():
    with pytest.raises(ArgumentError, match="Did you mean 'net'") as caught:
        arguments.variable("nett", {"net": 1, "nest": 2}, fitting=["net"])
    assert "nest" not in str(caught.value)


def test_a_parser_error_shows_the_usage_and_stays_in_the_kernel():
    parser = command.Parser("%ort_thing", command.takes("-n"))
    with pytest.raises(ArgumentError) as caught:
        parser.read("-n")
    assert type(caught.value) is ArgumentError
    assert str(caught.value).splitlines() == [
        "%ort_thing: argument -n: expected one argument.",
        "Why: Its form is %ort_thing [-h] [-n N].",
        "Next: %ort_thing? shows what each argument means.",
    ]


def test_options_and_pairs_mix_in_any_order():
    parser = command.Parser("%ort_thing", command.takes("model"), command.flag("--quiet"), command.CHANGES)
    read = parser.read("net --quiet memory_level=1 log_level=INFO")
    assert (read.model, read.quiet, read.changes) == ("net", True, ["memory_level=1", "log_level=INFO"])


def test_sets_of_plans():
    variables = {
        "one": "Gelu+:1:-1",
        "both": ("A+:1:-1", "B+:1:2"),
        "sets": ["A+:1:-1", ("A+:1:-1", "B+:1:2")],
    }
    assert arguments.plan_sets(["Gelu+:1:-1", "A+:1:-1,B+:1:2"], {}) == [
        ("Gelu+:1:-1",),
        ("A+:1:-1", "B+:1:2"),
    ]
    assert arguments.plan_sets(["$one", "$both"], variables) == ["Gelu+:1:-1", ("A+:1:-1", "B+:1:2")]
    assert arguments.plan_sets(["$sets"], variables) == variables["sets"]
    with pytest.raises(ArgumentError, match="There is no variable 'none'"):
        arguments.plan_sets(["$none"], variables)
