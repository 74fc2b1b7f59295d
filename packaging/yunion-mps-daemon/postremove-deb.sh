#!/bin/sh
set -e
#INCLUDE names.sh
#INCLUDE keys.sh
#INCLUDE purge.sh
case $1 in
remove | upgrade) ! systemd_runs || systemctl daemon-reload || : ;;
purge) purge ;;
esac
