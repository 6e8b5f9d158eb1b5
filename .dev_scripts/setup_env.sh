#!/usr/bin/env bash
# Makes the environments that the Makefile uses: .dev_scripts/setup_env.sh demo | test | onedl | lint
#   demo    .venv: torch, mmengine, mmcv-lite, mmpretrain. Wheels only, nothing is compiled.
#   test    .venv, made full: mmcv with its compiled operators, mmdet, mmsegmentation, the test tools.
#   onedl   .venv-onedl: the same on the OneDL packages.
#   lint    .venv with ruff at least.
# A stamp, written last, makes a second call free. It holds a hash of the pins, so a changed pin installs again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=${1:-}
venv=.venv
[ "$mode" = onedl ] && venv=.venv-onedl
req=requirements

say() { printf '[%s] %s\n' "$venv" "$*"; }

run_pip() { "$venv/bin/python" -m pip "$@"; }

# A full environment takes minutes; pip's many lines on what is there already hide what it does.
install() { run_pip install "$@" | { grep --line-buffered -v '^Requirement already satisfied' || true; }; }

fingerprint() { { pwd && cat .dev_scripts/setup_env.sh setup.py "$@"; } | cksum; }

installed_version() {
    "$venv/bin/python" -c 'import sys, importlib.metadata as m; print(m.version(sys.argv[1]))' "$1" 2>/dev/null
}

pinned() { sed -n "s/^$1==//p" "$2"; }

minutes() { printf '%dm%02ds' $(($1 / 60)) $(($1 % 60)); }

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

# A wheel from pip's cache may have been built for another torch: only a call shows it.
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

# Reads the output of a build, keeps it in the file $1 and shows how far ninja is.
show_progress() {
    local log=$1 begin=$SECONDS shown=-100 line
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        if [[ $line =~ ^[[:space:]]*\[([0-9]+)/([0-9]+)\] ]]; then
            if ((SECONDS - shown >= 15)) || [ "${BASH_REMATCH[1]}" = "${BASH_REMATCH[2]}" ]; then
                shown=$SECONDS
                say "compiling mmcv ops: ${BASH_REMATCH[1]}/${BASH_REMATCH[2]}, $(minutes $((SECONDS - begin)))"
            fi
        fi
    done
}

# build_mmcv REQUIREMENT [PIP_OPTION...]: leaves a wheel in $venv/wheels. Debug information and -O3, which mmcv asks
# for by default, cost three times the time.
build_mmcv() {
    local log=$venv/mmcv-build.log
    local -a settings=("CFLAGS=-g0 -O1 -w" "MAX_JOBS=${MAX_JOBS:-$(getconf _NPROCESSORS_ONLN)}" MMCV_WITH_OPS=1)
    # A GPU without the CUDA compiler would stop the build: then build for the CPU.
    command -v nvcc >/dev/null || settings+=(CUDA_VISIBLE_DEVICES=)
    rm -rf "$venv/wheels"
    : >"$log"
    if ! env "${settings[@]}" "$venv/bin/python" -m pip wheel --verbose --no-deps --no-build-isolation \
        --wheel-dir "$venv/wheels" "${@:2}" "$1" 2>&1 | show_progress "$log"; then
        tail -n 40 "$log" | cut -c -300
        say "building $1 failed; it needs a C++17 compiler and Python's headers. All of its output: $log"
        exit 1
    fi
}

# ensure_mmcv NAME FILE: NAME at its pin, with operators that work. The wheel is built before anything is removed, so
# that an interrupted build leaves a demo environment that works.
ensure_mmcv() {
    local name=$1 version attempt
    version=$(pinned "$name" "$2")
    if [ "$(installed_version "$name")" = "$version" ] && ! installed_version mmcv-lite >/dev/null &&
        mmcv_works 2>/dev/null; then
        return
    fi
    say "building $name $version: its operators are compiled, once; about a quarter of an hour on two cores,"
    say "seconds where pip's cache holds the wheel"
    for attempt in first last; do
        if [ "$attempt" = first ]; then
            build_mmcv "$name==$version"
        else
            say 'the wheel from the cache does not fit this torch: compiling it anew'
            build_mmcv "$name==$version" --no-cache-dir --no-binary "$name"
        fi
        rm -f "$venv/.demo-ready"
        if installed_version mmcv-lite >/dev/null; then run_pip uninstall --yes mmcv-lite; fi
        install --no-deps --force-reinstall "$venv"/wheels/*.whl
        install -r "$2"
        if [ "$attempt" = first ]; then
            mmcv_works 2>/dev/null && break
        else
            mmcv_works
        fi
    done
    rm -rf "$venv/wheels"
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
