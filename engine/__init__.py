"""Generation: `LLM` joins model, method, tokenizer and the decode loop."""

from engine.decode import Completion
from engine.llm import LLM, Ended
from engine.sampling import Sampling
from loading.tokenizer.turns import Chat

__all__ = ["LLM", "Chat", "Completion", "Ended", "Sampling"]
