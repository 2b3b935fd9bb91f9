"""The audit: probes of a run's own model, sampler and learner, before anything is trained.

- ``probe_row.py``: ``ProbeRow``, a probe's number, its bound, its verdict and what it finds.
- ``probe_prompts.py``: prompts with drawn images, and ``fitting``, those that fit a run.
- ``probed.py``: ``probed`` samples from the prompts and scores them in several ways; ``Probed`` has the numbers.
- ``second_turn.py``: ``second_turns``, what is sampled after an answer, in a run with an environment.
- ``scores.py``: the same of a reward model, which samples nothing: ``scores_of`` and ``score_rows``.
- ``values.py``: the same of a critic, for the samples of a ``Probed``: ``value_rows``.
- ``ranks.py``: ``rank_rows``, in runs whose sampler may be behind: every rank that samples scores those samples.
- ``agreement.py`` and ``sight.py``: rows from a ``Probed``; ``tokens.py``: rows of its prompts beside the template's.
- ``start_audit.py``: ``cheap_rows``, the rows that ``mmrl train`` asks for, and ``audit``, which acts on them.

A further probe is a function from a ``Probed`` to ``ProbeRow``s. One that needs more than that (an update, texts,
tools) is a generator of rows from ``(Engine, PromptEncoder, Config)``, as ``cheap_rows`` is. All use the seams of
``engine_api`` alone.
"""
