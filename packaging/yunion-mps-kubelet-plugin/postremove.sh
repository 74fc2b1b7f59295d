#!/bin/sh
set -e
case $1 in
remove | upgrade | [0-9]) ! [ -d /run/systemd/system ] || systemctl daemon-reload || : ;;
esac
