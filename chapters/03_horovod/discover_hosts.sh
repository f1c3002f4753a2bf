#!/usr/bin/env bash
# The hosts of an elastic run, one HOST:SLOTS a line; horovodrun asks every second. Here: this machine, under as many names as
# there are workers (127.0.0.1, 127.0.0.01, …), because a host that lost a worker is never used again. On a cluster it would
# print the nodes that the scheduler still lends.
zeros=""
for ((worker = 0; worker < ${GPT2_CHINESE_ELASTIC_WORKERS:-1}; worker++)); do
    echo "127.0.0.${zeros}1:1"
    zeros+="0"
done
