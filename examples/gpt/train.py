#!/usr/bin/env python3
"""Train a small GPT with FSDP2, and checkpoint it to S3 while it trains.

    torchrun --nproc-per-node 2 examples/gpt/train.py s3://bucket/run --steps 100
    torchrun --nproc-per-node 3 examples/gpt/train.py s3://bucket/run --steps 200 --resume

Endpoint and credentials come from the environment, by AWS's conventions.
"""
# ruff: noqa: T201 -- it says what it does
# torch does not declare all that it exports:
# mypy: disable-error-code="attr-defined,no-untyped-call"

from __future__ import annotations

import argparse
import ctypes
import hashlib
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import GPT, SIZES, batch_of, corpus
from records import Records
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dcp_s3 import S3StorageReader, S3StorageWriter, list_checkpoints

BATCH = 4
"""Pieces of text per rank and step."""
GROUP_TIMEOUT = timedelta(minutes=5)


class Training(Stateful):
    """Model and optimizer as DCP wants them: sharded tensors by name, whatever the number of ranks."""

    def __init__(self, size: str) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        self.model = GPT(SIZES[size])
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, text: torch.Tensor, number: int) -> float:
        """Train on one batch; return the loss over all ranks, in nats per byte."""
        pieces, following = batch_of(text, BATCH, seed=number * dist.get_world_size() + dist.get_rank())
        loss = functional.cross_entropy(self.model(pieces).flatten(0, 1), following.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        return mean.item()

    def state_dict(self) -> dict[str, Any]:
        """Return what has to be saved."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )

    def sha256(self) -> str:
        """Return a digest of every bit of parameters and optimizer state; the same on any number of ranks."""
        state = self.state_dict()
        tensors = {f"model.{name}": value for name, value in state["model"].items()}
        for name, moments in state["optimizer"]["state"].items():
            tensors.update({f"optimizer.{name}.{moment}": value for moment, value in moments.items()})
        digest = hashlib.sha256()
        for name, value in sorted(tensors.items()):
            whole = (value.full_tensor() if isinstance(value, DTensor) else value).contiguous()
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
        return digest.hexdigest()


def last_committed(url: str) -> str:
    """Return the URL of the run's last committed checkpoint, the same on all ranks."""
    found: list[str | None] = [None]
    if dist.get_rank() == 0:
        committed = [checkpoint.url for checkpoint in list_checkpoints(url) if checkpoint.state == "committed"]
        found = [committed[-1] if committed else None]
    dist.broadcast_object_list(found)
    if found[0] is None:
        raise SystemExit(f"there is no checkpoint to resume from at {url}")
    return found[0]


def resume(training: Training, url: str, group: dist.ProcessGroup, records: Records) -> int:
    """Load the last committed checkpoint; return its step."""
    last = last_committed(url)
    state: dict[str, Any] = {"training": training, "step": 0, "sha256": ""}
    started = time.perf_counter()
    dcp.load(state, storage_reader=S3StorageReader(last), process_group=group)
    seconds = time.perf_counter() - started
    step, saved = state["step"], state["sha256"]
    loaded = training.sha256()
    records.event("loaded", step=step, seconds=seconds, saved_sha256=saved, loaded_sha256=loaded)
    if dist.get_rank() == 0:
        print(f"{last} loaded in {seconds:.2f} s", flush=True)
    if loaded != saved:
        raise SystemExit(f"{last} was saved with the digest {saved} and loaded with {loaded}")
    return int(step)


def train(options: argparse.Namespace, records: Records) -> None:
    """Train, and save every few steps."""
    # The saves talk among each other while the training does, so they need a group of their own; and its time-out
    # bounds how long a rank waits for one that died.
    group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    writer = S3StorageWriter(options.url)
    training = Training(options.size)
    text = corpus()
    first = resume(training, options.url, group, records) if options.resume else 0
    pending: Any = None  # the future of the last async save

    for step in range(first + 1, options.steps + 1):
        loss = training.step(text, step)
        records.processes()
        records.event("step", step=step, loss=loss)
        if step % options.save_every:
            continue

        name = f"step-{step:06d}"
        state: dict[str, Any] = {"training": training, "step": step, "sha256": training.sha256()}
        mode = "sync" if step <= options.sync_until else options.mode
        dist.barrier()  # what comes now is timed
        with records.save(step, loss, mode, state["sha256"]) as save:
            if mode == "sync":
                dcp.save(state, checkpoint_id=name, storage_writer=writer, process_group=group)
                save.committed()
                continue
            if pending is not None:
                pending.result()  # DCP does not keep two saves apart; and this is where a failed one is heard of
            save.begun()
            pending = dcp.async_save(
                state,
                checkpoint_id=name,
                storage_writer=writer,
                process_group=group,
                async_checkpointer_type=AsyncCheckpointerType(mode),
            )
            pending.add_done_callback(save.ended)

    if pending is not None:
        pending.result()


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="s3://bucket/prefix of the run; checkpoints lie in <url>/step-<number>")
    parser.add_argument("--steps", type=int, default=100, help="number of the last step (default 100)")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saves (default 10)")
    parser.add_argument("--sync-until", type=int, default=0, help="save with dcp.save up to this step, for comparison")
    parser.add_argument("--mode", choices=("thread", "process"), default="thread", help="where async_save works")
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    parser.add_argument("--resume", action="store_true", help="go on from the last committed checkpoint")
    parser.add_argument("--records", type=Path, help="directory to note processes and events in")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
    records = Records(options.records, dist.get_rank())
    records.processes()
    train(options, records)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
