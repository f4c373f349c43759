#!/usr/bin/env bash
# Writes into both Dockerfiles the digest that the tag of their base has, so that all build on the same one. It asks
# the registry, by skopeo or Docker's buildx; run it anew to move on.
set -euo pipefail
cd "$(dirname "$0")/.."

digest() {
    if command -v skopeo >/dev/null; then
        skopeo inspect --format '{{.Digest}}' "docker://$1"
    elif command -v docker >/dev/null; then
        docker buildx imagetools inspect --format '{{.Manifest.Digest}}' "$1"
    else
        echo "error: neither skopeo nor docker is installed; install one of them" >&2
        return 1
    fi
}

for file in deploy/docker/Dockerfile.cpu deploy/docker/Dockerfile.gpu; do
    tag="$(sed -n 's/^ARG BASE=\([^@]*\).*/\1/p' "$file")"
    found="$(digest "$tag")"
    if [[ ! "$found" =~ ^sha256:[0-9a-f]{64}$ ]]; then
        echo "error: the registry says \"$found\" of $tag, which is no digest" >&2
        exit 1
    fi
    sed -i "s|^ARG BASE=.*|ARG BASE=$tag@$found|" "$file"
    echo "$file: $tag@$found"
done
