"""What DCP itself takes for 20,000 small tensors, whatever writes or reads them: ``python -m benchmarks.floor``."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from benchmarks import states
from benchmarks.jobs import use_one_thread

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner

ROUNDS = 6


class _Nothing(StorageWriter, StorageReader):
    """Writes nothing and reads nothing."""

    def __init__(self) -> None:
        self.metadata = Metadata({})

    def reset(self, checkpoint_id: Any = None) -> None:  # noqa: ANN401 -- DCP's own
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def prepare_local_plan(self, plan: Any) -> Any:  # noqa: ANN401
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:  # noqa: ANN401
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self.metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ANN401
        return self.metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ANN401, ARG003
        return True


def main() -> None:
    """Print the medians, with the garbage collector on and off."""
    warnings.simplefilter("ignore")
    use_one_thread()
    state = states.small(2.0)
    for collector in (True, False):
        saves, loads = [], []
        for _ in range(ROUNDS):
            nothing = _Nothing()
            if not collector:
                gc.disable()
            start = time.perf_counter()
            dcp.save(state, storage_writer=nothing, no_dist=True)
            middle = time.perf_counter()
            dcp.load(state, storage_reader=nothing, no_dist=True)
            end = time.perf_counter()
            gc.enable()
            saves.append(middle - start)
            loads.append(end - middle)
        told = f"save {statistics.median(saves):.2f} s, load {statistics.median(loads):.2f} s"
        print(f"{len(state):,} tensors, collector {'on' if collector else 'off'}: {told}")


if __name__ == "__main__":
    main()
