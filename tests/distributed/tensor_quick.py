"""Those checks of tensor parallelism on four ranks that are short enough for the test suite."""

from tests.distributed.tensor_2d import (
    check_checkpoints_move_between_meshes,
    check_penalties_and_layers_with_a_fast_path,
    check_programs_of_a_small_model,
    check_shards_of_parts_equal_one_process,
)

__all__ = [
    "check_checkpoints_move_between_meshes",
    "check_penalties_and_layers_with_a_fast_path",
    "check_programs_of_a_small_model",
    "check_shards_of_parts_equal_one_process",
]
