"""%ort_cluster and %ort_ranks refuse what cannot be; notebook 09 runs them, and %%ort_ranks, from start to stop."""

from __future__ import annotations

import pytest
from IPython.core.error import UsageError


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("%ort_cluster start", "How many ranks is missing"),
        ("%ort_cluster stop -n 2", "stop takes nothing else"),
        ("%ort_cluster -n many", "-n takes a whole number"),
        ("%ort_cluster -n 0", "A cluster of 0 ranks"),
        ("%ort_cluster -n 1 --backend mpi", "no backend 'mpi'"),
        ("%ort_cluster now", "invalid choice"),
        ("%ort_ranks --from nowhere", "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(shell, line, words):
    with pytest.raises(UsageError, match=words):
        shell.run(line)
