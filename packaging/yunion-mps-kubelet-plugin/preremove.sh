#!/bin/sh
set -e
[ -x /usr/lib/yunion-mps/maintain ] || exit 0 # the daemon's files were deleted, so there is nothing to clean up with
case $1 in
remove | 0) /usr/lib/yunion-mps/maintain plugin-going ;;
upgrade | [1-9]) /usr/lib/yunion-mps/maintain plugin-leaving-bytecode ;;
esac
