#!/usr/bin/env bash
# Prints the hosts of an elastic run, one HOST:SLOTS a line; horovodrun calls it every second. Here each worker gets its own name
# of this machine (127.0.0.1, 127.0.0.01, …), because horovodrun never uses a host again that has lost a worker. On a cluster
# the script would print the nodes that the scheduler still grants.
zeros=""
for ((worker = 0; worker < ${GPT2_CHINESE_ELASTIC_WORKERS:-1}; worker++)); do
    echo "127.0.0.${zeros}1:1"
    zeros+="0"
done
