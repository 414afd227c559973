# Sourced by tools/test and tools/release: finds Python and makes Python environments. Sets `python`, `cache` and, by
# `environment LIST`, `venv`.
program=tools/$(basename "$0")

fail() {
  echo "$program: $*" >&2
  exit 1
}

command -v cargo >/dev/null || fail "cargo is missing; install Rust from https://rustup.rs"

# The pinned ONNX Runtime has wheels for Python 3.11 and later.
python=
for candidate in python3 python3.13 python3.12 python3.11 python3.14; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "Python 3.11 or later is missing"

cache=${CKPT_OPT_CACHE:-${XDG_CACHE_HOME:-${HOME:?HOME is not set, and neither is CKPT_OPT_CACHE}/.cache}/ckpt-opt}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)

# One environment for each list of requirements and interpreter; it appears whole or not at all.
environment() {
  local list=$1 key fresh
  key=$(cat "$list" <("$python" -c 'import sys; print(sys.version, sys.executable)') | sha256sum | cut -c1-12)
  venv=$cache/venv-$key
  [ ! -d "$venv" ] || return 0
  echo "$program: making the Python environment of $list" >&2
  fresh=$(mktemp -d "$cache/venv.XXXXXX")
  trap "rm -rf '$fresh'" EXIT
  "$python" -m venv "$fresh" || fail "python's venv module does not work; on Debian install python3-venv"
  "$fresh/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary=:all: -r "$list"
  mv -T "$fresh" "$venv" 2>/dev/null || [ -d "$venv" ] || fail "cannot make $venv"
}
