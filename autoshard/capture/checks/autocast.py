"""Regions of ``torch.autocast`` that a capture would not see."""

from __future__ import annotations

import torch

from ...errors import CaptureError

_OTHERS = ("cuda", "xpu", "mps", "mtia")


def check_autocast_around() -> None:
    """Checks that no region of another device's is around the capture.

    Raises:
        CaptureError: there is one.
    """
    for device_type in _OTHERS:
        if torch.is_autocast_enabled(device_type):
            raise CaptureError(_not_seen(device_type, "around the call"))


def check_autocast_within(device_type: str, is_enabled: bool, where: str) -> None:
    """Checks a region that the model enters at the line ``where``.

    Raises:
        CaptureError: it is another device's, and not there to switch autocast off.
    """
    if is_enabled and device_type != "cpu":
        raise CaptureError(_not_seen(device_type, f"at {where}"))


def _not_seen(device_type: str, where: str) -> str:
    return (
        f"torch.autocast for {device_type} {where} has no effect on a capture, which is made of CPU tensors: convert "
        "the model (model.to(torch.bfloat16)) or cast in its forward"
    )
