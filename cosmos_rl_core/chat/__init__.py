"""Questions about pictures to models behind OpenAI-compatible services, such as vLLM's."""
