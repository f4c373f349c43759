#!/usr/bin/env bash
# Fetches a Prometheus 3 and its promtool into .prometheus-3, for tests; installs nothing.
#
#     scripts/prometheus_3.sh [FOLDER [SOURCE]]
#
# Debian 12 and 13 have Prometheus 2. The next Debian's packages are found and read by an apt with
# lists of its own, which proves the suite's index by its signature, and each package by the SHA256
# in that index. SOURCE is another line of sources.list. Where it cannot be had, one line says why,
# and FOLDER/missing says it to the tests, which are skipped with it.
set -euo pipefail
cd "$(dirname "$0")/.."

folder="${1:-.prometheus-3}"
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
source="${2:-deb [signed-by=$keyring] http://deb.debian.org/debian testing main}"
programs=(prometheus promtool)
mkdir -p "$folder"
folder="$(realpath "$folder")"

version_of() { { "$1" --version 2>&1 || true; } | sed -n '1s/.*version \([^ ]*\).*/\1/p'; }

if [[ "$(version_of "$folder/prometheus")" == 3.* && -x "$folder/promtool" ]]; then
    echo "Prometheus $(version_of "$folder/prometheus") is in $folder"
    exit
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

give_up() {
    echo "$1" >"$folder/missing"
    echo "no Prometheus 3, its tests are skipped: $1" >&2
    exit 1
}

fetch() {
    apt-get -qq -o Dir::Etc::SourceList="$work/sources.list" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null \
        -o Dir::State="$work/state" -o Dir::Cache="$work/cache" -o APT::Sandbox::User="$(id -un)" \
        -o APT::Update::Error-Mode=any -o Acquire::Languages=none -o Acquire::Retries=2 \
        -o Acquire::http::Timeout=30 "$@" >"$work/log" 2>&1 && return
    give_up "apt-get $*: $(grep -m1 '^E:' "$work/log" || tail -n1 "$work/log")"
}

command -v apt-get >/dev/null || give_up "this is no Debian: apt-get is missing"
echo "$source" >"$work/sources.list"
mkdir -p "$work/state/lists/partial" "$work/cache/archives/partial" "$work/programs"
fetch update
(cd "$work" && fetch download "${programs[@]}")
for program in "${programs[@]}"; do
    dpkg-deb --fsys-tarfile "$work/$program"_*.deb |
        tar -x -C "$work/programs" --strip-components=3 "./usr/bin/$program" ||
        give_up "$(basename "$work/$program"_*.deb) has no usr/bin/$program"
    version="$(version_of "$work/programs/$program")"
    [[ "$version" == 3.* ]] ||
        give_up "$(basename "$work/$program"_*.deb) is version '$version' when it runs here"
done
mv -f "$work/programs/"* "$folder/"
rm -f "$folder/missing"
echo "Prometheus $version is in $folder"
