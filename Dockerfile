# docker build --build-arg EXTRAS=postgres,gpu . makes the image that computes on a GPU.
ARG PYTHON_IMAGE=python:3.11-slim@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff
FROM ${PYTHON_IMAGE}
ARG EXTRAS=postgres,tables
# PyTorch's CPU index keeps gigabytes of CUDA out of an image that has no use for them.
ARG PIP_EXTRA_INDEX_URL=
ENV PYTHONUNBUFFERED=1
# Root owns the code, this user runs it; a fixed number, so that files can be given to it.
RUN useradd --system --no-create-home --uid 10001 nightjar
# The CPU kernels are compiled for the processor that they run on, at first use.
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV XDG_CACHE_HOME=/var/cache/nightjar
RUN install --directory --owner=nightjar --mode=0700 /var/cache/nightjar
WORKDIR /src
# The largest dependency has a layer of its own, kept while the code changes.
COPY constraints.txt .
RUN pip install --no-cache-dir --root-user-action=ignore -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir --root-user-action=ignore -c constraints.txt ".[${EXTRAS}]"
# Not in /src: what runs is what was installed.
WORKDIR /
# What NVIDIA's container runtime brings in; it ignores an image that does not ask.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER nightjar
CMD ["nightjar", "--help"]
