"""Names in the files of VideoReward, for its scorer, its model and the conversion of its weights."""

TOKENS = {"vq_reward": "<|VQ_reward|>", "mq_reward": "<|MQ_reward|>", "ta_reward": "<|TA_reward|>"}
"""The special tokens whose outputs are the scores, in the order of the head."""
PROMPT, NORMALISATION = "prompt.txt", "normalisation.json"
"""Files of the model's folder: the text around the prompt, with ``{text_prompt}`` in its place, and mean and deviation
of each raw score."""
