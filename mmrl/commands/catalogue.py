"""The commands and the exit codes: what ``mmrl --help`` prints, and ``mmrl help`` finds."""

from __future__ import annotations

COMMANDS = {
    "train": ("train", "train a policy"),
    "sweep": ("sweep.command", "train with each combination of values and each seed, and compare"),
    "check": ("check.command", "check config, plugins and data, without a GPU"),
    "plan": ("plan.command", "tell what a run takes in memory and time, before it starts"),
    "show": ("show", "print the resolved config and where each value was written"),
    "eval": ("eval.command", "evaluate a model, a run or a checkpoint on data.eval"),
    "export": ("export.command", "write a checkpoint as a model folder, and compare the two"),
    "plugins": ("plugins", "list the installed plugins"),
    "schema": ("schema", "print the JSON schema of the config, or of a plugin's options"),
    "doctor": ("doctor.command", "check versions, devices and the engines' numbers"),
    "replay": ("replay.command", "take finished steps of a run again, from its record"),
    "rollouts": ("rollouts", "print the completions that a run has recorded"),
    "view": ("view", "show runs in a browser: curves, rollouts with images and tokens, evaluations"),
    "report": ("report", "write runs as one page that opens without a server"),
    "monitor": ("monitor", "print the alarms of a recorded run"),
    "rewards": ("rewards.command", "try a reward"),
    "help": ("help.command", "find what the pages, the config's keys and the commands say of some words"),
    "init": ("init.command", "write a first config, or a plugin package, to edit"),
}
"""The module in ``mmrl.commands`` of each command, and its help."""
EXIT_CODES = {
    0: "done",
    1: "a bug",
    2: "bad config or usage",
    3: "data",
    4: "a plugin",
    5: "resources",
    6: "the numbers",
    10: "stopped by a signal and ready to go on",
    130: "Ctrl-C",
}
"""The meaning of each exit code."""
EPILOG = (
    "exit codes: "
    + ", ".join(f"{code} {text}" for code, text in EXIT_CODES.items())
    + "; `mmrl help WORDS`, such as `mmrl help exit code 6` or `mmrl help learner.lr`, finds what the pages say"
)
"""The end of ``mmrl --help``."""
