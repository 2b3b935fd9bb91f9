"""Text and tokens: chat templates, encoded prompts, turns and tool calls."""
