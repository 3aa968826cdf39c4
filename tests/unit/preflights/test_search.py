"""The search tests from the top down, goes into what does not pass, and tests nothing that cannot matter."""

from __future__ import annotations

from ortlab.checks.preflight import Part, largest, number_of_tests


def tree(spec: dict, path: str = "") -> Part:
    children = tuple(tree(inner, f"{path}.{name}" if path else name) for name, inner in spec.items())
    weight = sum(child.weight for child in children) or 10
    return Part(path, weight, not path.endswith("list"), children)


MODEL = tree(
    {
        "embed": {},
        "list": {str(n): {"attention": {}, "mlp": {"up": {}, "down": {}}} for n in range(4)},
        "head": {},
    }
)


def search(bad: set[str], known: set[str] = frozenset(), least: int = 1):
    tested = []

    def passes(part: Part) -> bool:
        tested.append(part.path)
        return not any(one.path in bad for one in part.inside())

    found = largest(MODEL, passes, guilty=lambda path: path in known, least=least)
    return [part.path for part in found], tested


def test_the_largest_parts_around_a_fault_are_found():
    found, _ = search({"list.1.mlp"})
    assert found == [
        "embed", "list.0", "list.1.attention", "list.1.mlp.up", "list.1.mlp.down", "list.2", "list.3", "head",
    ]  # fmt: skip


def test_a_container_without_a_forward_is_never_tested():
    _, tested = search(set())
    assert "list" not in tested


def test_what_holds_a_known_fault_is_not_tested():
    found, tested = search({"list.1.mlp"}, {"list.1.mlp"})
    assert found == search({"list.1.mlp"})[0]
    assert not {"list.1", "list.1.mlp"} & set(tested)


def test_small_parts_are_left_out():
    found, tested = search({"list.1.mlp"}, least=15)
    assert found == ["list.0", "list.2", "list.3"]
    assert tested == ["list.0", "list.1", "list.1.mlp", "list.2", "list.3"]


def test_the_number_of_tests_is_known_beforehand():
    known = {"list.1.mlp"}
    assert number_of_tests(MODEL, guilty=lambda path: path in known, least=1) == len(search(known, known)[1])
