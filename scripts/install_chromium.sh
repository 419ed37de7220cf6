#!/usr/bin/env bash
# Installs Chromium and its driver, for the tests of the built-in page; does nothing where they are already.
# Where they cannot be had (no apt, no rights, no network) it says why and succeeds: those tests then skip, with a reason.
set -euo pipefail
if command -v chromedriver >/dev/null && { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then
	exit 0
fi
if ! command -v apt-get >/dev/null; then
	echo "no Chromium here and no apt-get to install it with: the tests of the page will skip" >&2
	exit 0
fi
run() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
export DEBIAN_FRONTEND=noninteractive
if ! { run apt-get update -qq && run apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null; then
	echo "Chromium could not be installed with apt-get: the tests of the page will skip" >&2
fi
