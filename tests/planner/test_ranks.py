"""Plans against what two real processes did. ``python -m tests.distributed.planned 4`` compares all strategies."""

from tests.distributed.planned import compare
from tests.distributed.ranks import run_ranks


def test_collectives_parameters_and_states_are_those_of_real_ranks() -> None:
    real = run_ranks("planned:some", world_size=2)["planned:some"]
    for kind, found in real[0].items():
        compare(kind, found, 2)
