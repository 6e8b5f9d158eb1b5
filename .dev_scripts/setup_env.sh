#!/usr/bin/env bash
# Create the environments that the Makefile uses: .dev_scripts/setup_env.sh demo | test | onedl | lint
#   demo    .venv: torch, mmengine, mmcv-lite, mmpretrain. Wheels only, nothing is compiled.
#   test    .venv with everything: mmcv with compiled operators, mmdet, mmsegmentation, the test tools.
#   onedl   .venv-onedl: the same on the OneDL packages.
#   lint    .venv with at least ruff.
# A stamp, written last, makes a second call free. It holds a hash of the pins, so that a changed pin reinstalls.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=${1:-}
venv=.venv
[ "$mode" = onedl ] && venv=.venv-onedl
req=requirements

say() { printf '[%s] %s\n' "$venv" "$*"; }

run_pip() { "$venv/bin/python" -m pip "$@"; }

# A full environment takes minutes; pip's lines on installed packages would hide its progress.
install() { run_pip install "$@" | { grep --line-buffered -v '^Requirement already satisfied' || true; }; }

fingerprint() { { pwd && cat .dev_scripts/setup_env.sh .dev_scripts/build_mmcv.py setup.py "$@"; } | cksum; }

installed_version() {
    "$venv/bin/python" -c 'import sys, importlib.metadata as m; print(m.version(sys.argv[1]))' "$1" 2>/dev/null
}

pinned() { sed -n "s/^$1==//p" "$2"; }

make_venv() {
    if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say 'making the environment'
        "${PYTHON:-python3}" -m venv --clear "$venv"
    fi
}

install_mmkron() {
    say 'installing mmkron, editable'
    install --no-deps --no-build-isolation --editable .
}

# Only a call shows whether the operators fit this torch.
mmcv_works() {
    "$venv/bin/python" - <<'PY'
import torch
from mmcv.ops import nms

boxes = torch.tensor([[0., 0., 10., 10.], [1., 1., 11., 11.], [20., 20., 30., 30.]])
kept = nms(boxes, torch.tensor([0.7, 0.9, 0.8]), iou_threshold=0.5)[1]
if kept.tolist() != [1, 2]:
    raise SystemExit(f'mmcv.ops.nms keeps the boxes {kept.tolist()} instead of [1, 2]')
PY
}

# ensure_mmcv NAME FILE: NAME at its pin, with operators that work. The wheel is built before anything is removed, so
# that an interrupted build leaves a demo environment that works.
ensure_mmcv() {
    local name=$1 version
    version=$(pinned "$name" "$2")
    if [ "$(installed_version "$name")" = "$version" ] && ! installed_version mmcv-lite >/dev/null &&
        mmcv_works 2>/dev/null; then
        return
    fi
    say "building $name $version: its operators are compiled, once; about two minutes on two cores"
    rm -rf "$venv/wheels"
    "$venv/bin/python" .dev_scripts/build_mmcv.py "$name==$version" --wheel-dir "$venv/wheels" --log "$venv/mmcv-build.log"
    rm -f "$venv/.demo-ready"
    if installed_version mmcv-lite >/dev/null; then run_pip uninstall --yes mmcv-lite; fi
    install --no-deps --force-reinstall "$venv"/wheels/*.whl
    rm -rf "$venv/wheels"
    install -r "$2"
}

demo_files=("$req"/{torch,common,base,classification}.txt)
test_files=("${demo_files[@]}" "$req"/{mmcv,full,lint,test}.txt)
onedl_files=("$req"/{torch,common,onedl,lint,test}.txt)

is_ready() { [ "$(cat "$venv/.$1-ready" 2>/dev/null)" = "$(fingerprint "${@:2}")" ]; }

set_ready() { fingerprint "${@:2}" >"$venv/.$1-ready"; }

case $mode in
demo)
    is_ready demo "${demo_files[@]}" && exit
    make_venv
    say 'installing torch (some gigabytes), mmengine, mmpretrain'
    install -r $req/torch.txt
    if installed_version mmcv >/dev/null; then
        install -r $req/base.txt # never mmcv-lite over a compiled mmcv
    else
        install -r $req/classification.txt
    fi
    install_mmkron
    set_ready demo "${demo_files[@]}"
    ;;
test)
    is_ready test "${test_files[@]}" && exit
    make_venv
    say 'installing torch (some gigabytes), then mmcv, mmdet, mmsegmentation, mmpretrain and the test tools'
    install -r $req/torch.txt
    install -r $req/base.txt
    ensure_mmcv mmcv $req/mmcv.txt
    install -r $req/full.txt -r $req/test.txt
    install_mmkron
    mmcv_works
    set_ready demo "${demo_files[@]}"
    set_ready test "${test_files[@]}"
    ;;
onedl)
    is_ready onedl "${onedl_files[@]}" && exit
    make_venv
    say 'installing torch (some gigabytes), then the OneDL packages and the test tools'
    install -r $req/torch.txt
    install -r $req/common.txt
    ensure_mmcv onedl-mmcv $req/onedl.txt
    install -r $req/onedl.txt -r $req/test.txt
    install_mmkron
    mmcv_works
    set_ready onedl "${onedl_files[@]}"
    ;;
lint)
    [ "$("$venv/bin/ruff" --version 2>/dev/null)" = "ruff $(pinned ruff $req/lint.txt)" ] && exit
    make_venv
    install -r $req/lint.txt
    ;;
*)
    sed -n '2,6s/^# //p' .dev_scripts/setup_env.sh
    exit 2
    ;;
esac
say 'ready'
