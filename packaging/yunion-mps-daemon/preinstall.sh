#!/bin/sh
# $1: of dpkg, a word; of rpm, the number of versions that are installed afterwards
set -e
#INCLUDE names.sh
#INCLUDE before.sh
case $1 in
install | upgrade | [1-9])
    check_host
    note_cloudpods
    ;;
esac
