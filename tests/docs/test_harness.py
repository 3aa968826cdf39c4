"""What runs the pages finds what is wrong with one."""

from __future__ import annotations

import pages
import pytest


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nls\n```\n", "a block of no language"),
        ("Run it:\n\n```python needs-gpu\npass\n```\n", "the reader is not told"),
        ("*Needs a GPU:*\n\nRun it:\n\n```python needs-gpu\npass\n```\n", "the reader is not told"),
        ("*Needs a GPU:*\n\n```python needs-luck\npass\n```\n", "there is no mark 'needs-luck'"),
        ("```text output\n1\n```\n", "an output without a block before it"),
    ],
)
def test_a_page_that_does_not_tell_what_a_block_is(tmp_path, text, said):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    (note,) = pages.read(page).notes
    assert said in note


def test_a_diff_is_shown_and_never_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```diff\n+ lab = wrap(model)\n  loss()\n- old()\n```\n", encoding="utf-8")
    read = pages.read(page)
    assert (read.blocks, read.notes, read.added) == ([], [], ["lab = wrap(model)"])


def test_a_page_is_run_as_it_is_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        """
```python
kept = 41
print("took 12.5 ms")
kept + 1
```

```text output
took 9.8 ms
42
```

```bash
echo one > file; echo two; echo three
```

```text output
two
...
```

```python
print(open("file").read()); kept
```

```text output
one
40
```

```python
%no_such_magic
```

```bash
exit 3
```

*Needs a GPU*, and is not run:

```python needs-gpu
raise SystemError
```

```python script
print(kept)
```

```text output
...
41
```
""",
        encoding="utf-8",
    )
    read = pages.read(page)
    assert read.notes == []
    pages.run(read.blocks, tmp_path)
    good, shell, wrong, magic, failing, marked, script = read.blocks
    assert not good.fault
    assert not shell.fault
    assert "where the page says\none\n40" in wrong.fault
    assert "no_such_magic" in magic.fault
    assert "exit code 3" in failing.fault
    assert not marked.ran
    assert not script.fault
    assert script.printed.splitlines()[-1] == "41"
