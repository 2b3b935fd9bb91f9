"""Published methods as plugins of mmrl: a file each, which opens with paper, formula and deviations."""
