FROM python:3.11-slim
WORKDIR /app
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[postgres]" \
    && useradd --system nightjar
USER nightjar
CMD ["nightjar", "--help"]
