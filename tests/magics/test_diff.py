"""%ort_diff shows what is different between two graphs."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError


@pytest.mark.row("B10")
def test_stages_and_switches_are_compared(stepped_shell):
    lab = stepped_shell.user_ns["lab"]
    stages = stepped_shell.run("%ort_diff processed optimized")
    assert (stages.before.name, stages.after.name) == ("processed", "optimized")
    shown = stepped_shell.formats(stages)
    assert stages.sentences[0] in shown["text/plain"].replace("\n", " ")
    assert "Difference of graphs: processed" in shown["text/html"]
    assert stepped_shell.run("%ort_diff opset=20 --stage exported").after.name == "opset=20"
    one = stepped_shell.run("%ort_diff opset=20 --against opset=16 --stage exported")
    assert (one.before.name, one.after.name) == ("opset=16", "opset=20")
    stepped_shell.user_ns["old"] = {"opset": 16}
    assert stepped_shell.run("%ort_diff opset=20 --against $old --stage exported") == one
    view = stepped_shell.run("%ort_diff processed optimized --view")
    assert view.marks == stages.colours()[1]
    view.close()
    assert len(lab.runs) == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%ort_diff", "compares two stages"),
        ("%ort_diff gradient", "compares two stages"),
        ("%ort_diff gradient execution --stage exported", "compares two stages"),
        ("%ort_diff gradient opset=20", "compares two stages"),
        ("%ort_diff gradiant execution", "Did you mean 'gradient'"),
        ("%ort_diff opset=20 --stage executed", "no graph stage"),
        ("%ort_diff opset=20 --part encoder", "no wrapped part"),
        ("%ort_diff engine=eager", "has no graph to compare"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(stepped_shell, line, words):
    with pytest.raises(UsageError, match=words) as error:
        stepped_shell.run(line)
    assert type(error.value) is UsageError


def test_before_a_step_it_says_what_to_do(net_shell):
    with pytest.raises(UsageError, match="no step to go back to"):
        net_shell.run("%ort_diff memory_level=1")
