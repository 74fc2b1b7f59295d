#!/bin/sh
set -e
case $1 in
configure)
    [ -n "$2" ] || /usr/lib/yunion-mps/maintain first # $2: the version that was configured before
    /usr/lib/yunion-mps/maintain installed
    ;;
triggered | abort-*) /usr/lib/yunion-mps/maintain python-changed ;;
1) /usr/lib/yunion-mps/maintain first ;; # rpm goes on with posttrans.sh
[2-9]) /usr/lib/yunion-mps/maintain before-cloudpods-goes ;;
esac
