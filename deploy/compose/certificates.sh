#!/bin/sh
# Runs in the container `certificates` of tls.yml: an authority, a certificate for every task, and a token, sorted by
# service, for the user of the tasks alone. Arguments: how many workers and how many ps. What is there stays.
set -eu
umask 077
num_workers=$1 num_ps=$2
cd /secrets
[ -e authority/ca.key ] || stratagem certs init --dir authority
[ -e authority/token ] || python -c 'import secrets; print(secrets.token_hex(32))' > authority/token

tasks() { # TYPE COUNT
    i=0
    while [ "$i" -lt "$2" ]; do
        echo "$1:$i"
        i=$((i + 1))
    done
}

give() { # SERVICE TASK...
    service=$1
    shift
    mkdir -p "$service"
    for task in "$@"; do
        stem=$(echo "$task" | tr : -)
        [ -e "authority/$stem.crt" ] || stratagem certs issue --dir authority "$task"
        cp "authority/$stem.crt" "authority/$stem.key" "$service/"
    done
    cp authority/ca.crt authority/token "$service/"
    chown -R 10001:10001 "$service"
}

give chief chief:0
give ps $(tasks ps "$num_ps")
give worker $(tasks worker "$num_workers")
give evaluator evaluator:0
give operator operator
echo "the secrets are in place; keep the folder authority to yourself"
