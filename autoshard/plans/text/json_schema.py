"""The JSON Schema of plan files, with which editors complete and check them while they are edited.

``docs/plan.schema.json`` is this text; a test keeps them equal. What a schema cannot say (layouts fit their shapes,
counts agree with patterns, totals add up) is checked when the file is read.
"""

from __future__ import annotations

import json
from typing import Any

from .schema import FORMAT_VERSION, PlanDocument

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def plan_schema() -> dict[str, Any]:
    """The schema of the present format."""
    schema = PlanDocument.model_json_schema(by_alias=True, mode="validation")
    schema["$defs"]["RedistributionLine"]["properties"]["kept"]["default"] = False  # a text to us, a boolean to editors
    return {"$schema": DIALECT, **schema, "title": f"autoshard plan, format {FORMAT_VERSION}"}


def schema_text() -> str:
    """The schema as the text of its file."""
    return json.dumps(plan_schema(), indent=2) + "\n"
