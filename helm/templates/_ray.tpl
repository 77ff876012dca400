{{/* Options of the Ray cluster. */}}

{{- define "topwork.faultTolerance" -}}
{{- $ft := .Values.ray.faultTolerance }}
{{- if eq $ft.backend "redis" -}}
gcsFaultToleranceOptions:
  redisAddress: {{ $ft.redis.address | quote }}
  {{- if $ft.redis.password.secretName }}
  redisPassword:
    valueFrom:
      secretKeyRef:
        name: {{ $ft.redis.password.secretName | quote }}
        key: {{ $ft.redis.password.key | quote }}
  {{- end }}
{{- else if eq $ft.backend "rocksdb" -}}
gcsFaultToleranceOptions:
  backend: rocksdb
  storage:
    size: {{ $ft.rocksdb.size | quote }}
    {{- with $ft.rocksdb.storageClass }}
    storageClassName: {{ . | quote }}
    {{- end }}
{{- end }}
{{- end }}

{{- define "topwork.autoscaler" -}}
idleTimeoutSeconds: {{ .Values.ray.autoscaler.idleTimeoutSeconds }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
resources:
  {{- toYaml .Values.ray.autoscaler.resources | nindent 2 }}
securityContext:
  {{- toYaml .Values.securityContext | nindent 2 }}
env:
  - name: HOME
    value: /home/topwork
  - name: USER
    value: topwork
  {{- include "topwork.tlsEnvironment" . | nindent 2 }}
volumeMounts:
  {{- include "topwork.tlsMount" . | nindent 2 }}
  - name: tmp
    mountPath: /tmp
  - name: home
    mountPath: /home/topwork
{{- end }}

{{/* The port of the Redis that keeps the head's state; nothing if there is none. */}}
{{- define "topwork.redisPort" -}}
{{- $ft := .Values.ray.faultTolerance }}
{{- if and (eq .Values.mode "rayservice") (eq $ft.backend "redis") }}
{{- regexFind ":[0-9]+$" $ft.redis.address | trimPrefix ":" | default "6379" }}
{{- end }}
{{- end }}
