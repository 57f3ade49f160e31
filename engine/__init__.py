"""Generation: `LLM` joins model, method, tokenizer and the decode loop."""

from engine.llm import LLM, Completion, Ended
from engine.sampling import Sampling

__all__ = ["LLM", "Completion", "Ended", "Sampling"]
