"""Names of a loaded VLM, which generates answers, and of the prompts that it gets."""

from cosmos_rl_core.vlms._model import Answer, Vlm, load
from cosmos_rl_core.vlms._prompts import Message, Prompts

__all__ = ["Answer", "Message", "Prompts", "Vlm", "load"]
