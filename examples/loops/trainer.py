"""The Trainer of Hugging Face, with accelerate, trains a small Llama of theirs under a plan.

autoshard plan examples/loops/trainer.py:small --mesh dp=2,tp=2 --hardware cpu-gloo -o plan.yaml
torchrun --nproc-per-node 4 examples/loops/trainer.py plan.yaml
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autoshard

BATCH, LENGTH, STEPS = 8, 16, 6


def small() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """The model, and a call of it: what ``autoshard plan`` asks for."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": LENGTH}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    return model, (), {"input_ids": ids, "labels": ids}


class Rows(Dataset[dict[str, Tensor]]):
    """Rows that count on from somewhere."""

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.arange(row, row + LENGTH) * 7 % 64
        return {"input_ids": ids, "labels": ids}


class PlannedTrainer(Trainer):
    """A trainer of a parallel module: it reads and cuts batches as the plan says."""

    def __init__(self, plan: autoshard.ShardingPlan, mesh: DeviceMesh, model: nn.Module, **options: Any) -> None:
        super().__init__(model=model, **options)
        self.is_distributed_loading_by_transformers = True  # the model holds shards, and is not to be wrapped in DDP
        self.model_accepts_loss_kwargs = False  # the plan is for a call without the number of items
        self._plan, self._mesh = plan, mesh

    def get_train_dataloader(self) -> DataLoader[Any]:
        """What this rank reads."""
        sampler = autoshard.sampler(self._plan, self._mesh, self.train_dataset, seed=self.args.seed)
        size = self._plan.inputs[0].shape[0] // sampler.num_replicas
        return DataLoader(self.train_dataset, size, sampler=sampler, collate_fn=self.data_collator)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        """The loss of all ranks' samples, equal on all of them."""
        return model(**autoshard.shard_inputs(self._plan, self._mesh, inputs)).loss


def main() -> None:
    """Trains as one rank of a job that torchrun started; the first rank prints losses."""
    plan = autoshard.read_plan(Path(sys.argv[1]))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", plan.mesh.shape, mesh_dim_names=plan.mesh.axes)
    model = autoshard.parallelize(small()[0], plan, mesh)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            **{"output_dir": folder, "use_cpu": True, "max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-2},
            **{"save_strategy": "no", "report_to": [], "disable_tqdm": True, "lr_scheduler_type": "linear"},
        )
        trainer = PlannedTrainer(plan, mesh, model, args=arguments, train_dataset=Rows())
        trainer.train()
    if dist.get_rank() == 0:
        print("losses", *(entry["loss"] for entry in trainer.state.log_history if "loss" in entry), flush=True)
    dist.barrier()
    os._exit(0)  # gloo's threads abort about one teardown in four


if __name__ == "__main__":
    main()
