# syntax=docker/dockerfile:1
# CUDA:  docker build -t tunekit .
#        docker run --rm --gpus all --ipc host -v "$PWD:/work" tunekit train recipe.yaml
# CPU:   docker build -t tunekit:cpu --build-arg TORCH_INDEX=INDEX .
#        with the index of PyTorch's CPU builds (https://pytorch.org/get-started) in place of INDEX
#
# PyTorch's wheels bring CUDA's libraries, so the image needs none; --ipc host gives processes the shared memory that
# NCCL and data workers use. What DeepSpeed compiles for CPU offload needs nvcc: start from a CUDA devel image with
# Python then (--build-arg BASE=IMAGE).
ARG BASE=python:3.12-slim-bookworm
FROM ${BASE}

# Triton and DeepSpeed compile with gcc, programs of code rewards need seccomp, and `tunekit train --nodes` uses ssh.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libseccomp2 openssh-client \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=""
ARG EXTRAS=deepspeed,eval,gpu,optim,rewards,serve,sweep,tracking,webui
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

COPY . /opt/tunekit
RUN if [ -n "${TORCH_INDEX}" ]; then pip install "torch>=2.11,<2.14" --index-url "${TORCH_INDEX}"; fi \
    && pip install "/opt/tunekit[${EXTRAS}]" \
    && useradd --create-home --uid 1000 tunekit \
    && mkdir /work && chmod 777 /work /home/tunekit

# Files of runs belong to this user; --user "$(id -u):$(id -g)" makes them yours. Such a user has no name and no home.
USER 1000
ENV HOME=/home/tunekit USER=tunekit
WORKDIR /work
EXPOSE 7860
ENTRYPOINT ["tunekit"]
CMD ["--help"]
