"""Settings of torch, outside of a model, that decide in which dtype it computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InputError


@dataclass(frozen=True)
class Settings:
    """``autocast`` is the dtype of ``torch.autocast`` (None outside of it), ``default_dtype`` that of new tensors."""

    autocast: torch.dtype | None
    default_dtype: torch.dtype

    @classmethod
    def now(cls, device_type: str) -> Settings:
        """The settings of autocast that are in force now for a type of device, for example ``cpu``."""
        enabled = torch.is_autocast_enabled(device_type)
        return cls(torch.get_autocast_dtype(device_type) if enabled else None, torch.get_default_dtype())

    @classmethod
    def of_capture(cls, device_type: str) -> Settings:
        """Those of a capture at this moment, for a module that runs on a type of device.

        Raises:
            InputError: a model is captured as on a CPU, and other devices have other rules for autocast.
        """
        found = cls.now("cpu")
        if found.autocast is not None and device_type != "cpu":
            raise InputError(
                f"the model was captured {_region(found.autocast)} for the CPU, whose rules are not those of "
                f"{device_type}; leave the region and convert the model instead: model.to({found.autocast})"
            )
        return found

    def check(self, found: Settings) -> None:
        """Checks that a module captured under these settings is called under the same.

        Raises:
            InputError: it is not.
        """
        if found.autocast != self.autocast:
            raise InputError(
                f"the model was captured {_region(self.autocast)} and is called {_region(found.autocast)}: call it "
                "under the same, or plan and parallelize it under the autocast that it is to run under"
            )
        if found.default_dtype != self.default_dtype:
            raise InputError(
                f"the model was captured with {self.default_dtype} as torch's default dtype, and it is called with "
                f"{found.default_dtype}: call it with the same, or plan and parallelize it with the other"
            )


def _region(dtype: torch.dtype | None) -> str:
    return "outside of torch.autocast" if dtype is None else f"under torch.autocast to {dtype}"
