#!/bin/sh
set -e
[ -x /usr/lib/yunion-mps/maintain ] || exit 0 # our files were deleted, so there is nothing to clean up with
case $1 in
remove | 0) /usr/lib/yunion-mps/maintain going ;;
upgrade)
    /usr/lib/yunion-mps/maintain leaving-bytecode
    dpkg --compare-versions "$2" ge 1:0 || /usr/lib/yunion-mps/maintain replaced # only our versions have an epoch
    ;;
[1-9]) # otherwise directories of removed modules would be left behind with bytecode in them
    /usr/lib/yunion-mps/maintain leaving-bytecode
    [ ! -e /opt/yunion/bin/mps-daemon ] || /usr/lib/yunion-mps/maintain replaced
    ;;
esac
