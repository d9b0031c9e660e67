#!/usr/bin/env bash
# What CI cannot run: the single-process tests, the demo and the sharded program of one rank, on a machine with one GPU.
# usage: benchmarks/gpu_checks.sh OUTPUT_FOLDER [WHEELS_FOLDER]
set -u
out=${1:?usage: gpu_checks.sh OUTPUT_FOLDER [WHEELS_FOLDER]}
wheels=${2:-}
if [ -n "$wheels" ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site "$wheels"/*.whl
  export PYTHONPATH=/tmp/site
fi
export PYTHONPATH=$PWD/src:$PWD:${PYTHONPATH:-} PYTHONUNBUFFERED=1
python3 -c "import torch, lightning; print('torch', torch.__version__, 'lightning', lightning.__version__, torch.cuda.get_device_name())"
run() { # name, seconds, command...
  local name=$1 limit=$2; shift 2
  local start=$SECONDS
  timeout "$limit" "$@" > "$out/$name.log" 2>&1
  echo "$name: exit $?, $((SECONDS - start)) s; $(tail -n 1 "$out/$name.log" | cut -c1-150)"
}
run tests 400 python3 -m pytest -p no:cacheprovider -n 11 tests/compiler tests/executors tests/steps tests/strategies tests/transforms --timeout 200 &
run demo 250 python3 examples/pretrain_text.py
for sharding in none zero2 zero3; do
  run "sharded_$sharding" 150 python3 benchmarks/sharded_rank_of_eight.py --sharding $sharding --length 2048
done
wait
