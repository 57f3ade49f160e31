"""Generation: `LLM` joins model, method, tokenizer and the decode loop."""

from engine.llm import LLM, Completion, Ended
from engine.sampling import Sampling
from loading.tokenizer.turns import Chat

__all__ = ["LLM", "Chat", "Completion", "Ended", "Sampling"]
