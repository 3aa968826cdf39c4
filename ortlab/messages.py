"""What was said during builds: by torch's exporter, by ORTModule and by ONNX Runtime itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Message:
    """One message.

    Attributes
    ----------
    level
        "DEBUG", "INFO", "WARNING" or "ERROR".
    source
        "exporter" (torch and the model's own code while it is traced), "ORTModule" or "ONNX Runtime".
    text
        What was said, without time stamp and colours.
    """

    level: str
    source: str
    text: str
