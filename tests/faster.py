"""Settings of processes that compile many small programs: less time, the same programs."""

import gc

import torch._dynamo.config
import torch._dynamo.guards

MANY_OBJECTS = (20_000, 20, 50)


def compile_faster() -> None:
    """Call it once everything is imported."""
    # Dynamo empties the processor's caches to measure how fast a program's guards are: 27 ms, and only for its log.
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0
    # And it formats a stack for each thing that a step changes, also only for its log: 3 % of a small compilation.
    if hasattr(torch._dynamo.config, "side_effect_replay_policy"):
        torch._dynamo.config.side_effect_replay_policy = "silent"
    gc.collect()
    gc.freeze()  # modules: what is shared by forked processes stays shared, and no collection looks at it again
    gc.set_threshold(*MANY_OBJECTS)
