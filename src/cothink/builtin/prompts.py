"""The system prompts and message layouts that the built-in model was trained on."""

from __future__ import annotations

from collections.abc import Mapping

PROMPTS: Mapping[str, str] = {
    "solo": "Solve.",
    "plan_solve": "Plan, then solve.",
    "meta": "Plan.",
    "reasoning": "Follow the plan.",
    "meta_multi": "Guide.",
    "reasoning_multi": "Follow.",
    "generator": "Answer.",
    "verifier": "Check.",
    "refiner": "Refine.",
}
"""Role -> system prompt. The model obeys these lines only; any other prompt is foreign to it."""

INSTRUCT = "Question:\n{question}\n\nInstruction:\n{plan}"
VERIFY = "Question:\n{question}\n\nAnswer:\n{answer}"
REFINE = "Question:\n{question}\n\nAnswer:\n{answer}\n\nVerification:\n{verification}"
FINISH = "[FINISH]"
