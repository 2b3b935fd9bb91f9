#!/usr/bin/env bash
# Distils teachers into a tiny vision-language policy that reads half of the digits, without a reward: first one teacher,
# which GRPO has made of that policy, then two, one for digits that stand upright and one for digits that lie.
#
#   bash examples/distillation.sh [overrides of all runs]
#   SEED=1                        of the model and the runs (default: 0)
#   MMRL_VENV=DIR                 the virtual environment (default: .venv)
source "$(dirname "${BASH_SOURCE[0]}")/setup/stages.sh" distillation
upright=$base/upright
turned=$base/turned
overrides=("$@")

train() { # CONFIG FOLDER OVERRIDES...
    "$python" -m mmrl train "examples/$1.yaml" "trainer.run_dir=$run/$2" "trainer.seed=$seed" 'trackers=[]' "${@:3}" \
        "${overrides[@]}"
}

table() { # FOLDER SPLIT LABEL [OPTIONS]
    printf '{name: table, path: %s, split: %s, label: %s%s}' "$1" "$2" "$3" "${4:+, $4}"
}

sets() { # LABEL LABEL
    printf 'data.eval={upright: %s, turned: %s}' "$(table "$upright" test "$1")" "$(table "$turned" test "$2")"
}

on=("data.train.path=$upright" "data.eval.path=$upright")
half=(trainer.steps=250 trainer.eval_every=5 trainer.save_every=0)

say "A random Qwen2.5-VL of 0.6 million parameters, and 1,797 real handwritten digits, upright and turned by a quarter"
"$python" examples/tiny_model.py "$base/model" --seed "$seed"
"$python" -m mmrl_datasets.digits "$upright" --warmup 600
"$python" -m mmrl_datasets.digits "$turned" --warmup 600 --quarter-turns 1

say "Supervised warm-up on upright digits, until it reads half of them"
train digits_sft warmup "model.path=$base/model" "${on[@]}" "${half[@]}" 'trainer.stop_when=eval/accuracy >= 0.45'

say "The teacher of upright digits: GRPO from there, 130 steps"
train digits_grpo grpo "model.path=$(last warmup)" "${on[@]}" trainer.eval_every=13

say "Distillation from this teacher into the warm-up, 65 steps"
train digits_opd opd "model.path=$(last warmup)" "reference.path=$(last grpo)" "${on[@]}"

say "The teacher of turned digits: 150 supervised steps on all training digits"
train digits_sft supervised "model.path=$base/model" "data.train.path=$turned" data.train.split=train \
    "data.eval.path=$turned" trainer.steps=150 trainer.eval_every=50 trainer.save_every=0 learner.schedule=linear

say "Supervised warm-up on digits of both kinds, until it reads half of them"
train digits_sft both "model.path=$base/model" "data.train=$(table "$upright" warmup upright)" \
    "data.mix=[$(table "$turned" warmup turned)]" "$(sets upright turned)" "${half[@]}" \
    'trainer.stop_when=eval/turned/accuracy >= 0.45'

# As many digits of each kind in a step as from one teacher. \boxed{7} has five tokens, then the end, which is not sampled:
# no reward of GRPO's has looked at it, so a teacher may have forgotten it.
say "Distillation from both teachers, each for its own digits, 130 steps"
train digits_opd two "model.path=$(last both)" \
    "reference=[{path: $(last grpo), sources: [upright]}, {path: $(last supervised), sources: [turned]}]" \
    "data.train=$(table "$upright" train upright 'weight: 1')" \
    "data.mix=[$(table "$turned" train turned 'weight: 1')]" "$(sets held_out held_out)" \
    trainer.steps=130 trainer.eval_every=26 trainer.prompts_per_step=128 sampler.max_new_tokens=5

"$python" - "$run" <<'PYTHON'
import sys
from pathlib import Path

import mmrl

run = Path(sys.argv[1])


def accuracy(name: str, of: str = "") -> str:
    curve = [*mmrl.load_run(run / name).metrics.curve(f"eval/{of}accuracy").values()]
    return f"{curve[0]:.1%} before, {curve[-1]:.1%} after"


grpo = mmrl.load_run(run / "grpo").metrics.curve("eval/accuracy")
print(f"\n== Held-out digits read. Upright: the teacher, by GRPO: {accuracy('grpo')} ({grpo[65]:.1%} after 65 steps)")
print(f"the policy, by distillation in 65 steps: {accuracy('opd')}")
print(f"Two teachers, upright: {accuracy('two', 'upright/')}; the teacher {grpo[130]:.1%}")
taught = [*mmrl.load_run(run / "supervised").metrics.curve("eval/accuracy").values()][-1]
print(f"Two teachers, turned: {accuracy('two', 'turned/')}; the teacher {taught:.1%}")
print(f"Where policy and teacher differ, token by token: mmrl rollouts {run}/opd; mmrl view {run}")
PYTHON
