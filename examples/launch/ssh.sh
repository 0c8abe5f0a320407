#!/bin/bash
# examples/train.py on machines that you reach by ssh, one process for each; the first is process 0.
#   HOSTS="gpu1 gpu2" DEVICES=8 examples/launch/ssh.sh --strategy fsdp --checkpoints /shared/tiny
# The repository lies in the same folder everywhere, and --checkpoints on storage that all share.
#
# On Cloud TPUs this is one command, because JAX finds out alone who the others are:
#   gcloud compute tpus tpu-vm ssh NAME --worker=all --command="cd one-program && \
#       python examples/train.py --processes 4 --devices 16 --strategy fsdp"
set -u
read -r -a hosts <<< "${HOSTS:?the machines, as in HOSTS=\"gpu1 gpu2\"}"
: "${DEVICES:?the devices of all machines together}"
coordinator=${COORDINATOR:-${hosts[0]}:8476}
python=${REMOTE_PYTHON:-python}

pids=()
for number in "${!hosts[@]}"; do
    # -tt: when this script ends, the remote program gets SIGHUP and ends as well.
    # --processes and --devices are the first assertion of the job.
    ssh -tt "${hosts[$number]}" "cd $(printf %q "$PWD") && exec $python examples/train.py \
        --coordinator $coordinator --processes ${#hosts[@]} --process $number \
        --devices $DEVICES --watchdog 600 $(printf '%q ' "$@")" < /dev/null &
    pids+=($!)
done
trap 'kill "${pids[@]}" 2> /dev/null' EXIT

# The exit status of the first process that fails; the others would wait for it, so they are ended.
for _ in "${pids[@]}"; do
    wait -n || exit $?
done
