{{/* Volumes of every pod, where they are mounted, and what fills them before a pod starts. */}}

{{/* A source of files: dict "root" $ "name" "model" "values" .Values.model. */}}
{{- define "topwork.sourceVolume" -}}
{{- if eq .values.source "pvc" }}
- name: {{ .name }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-%s" (include "topwork.fullname" .root) .name) .values.pvc.existingClaim | quote }}
    readOnly: true
{{- else if eq .values.source "hostPath" }}
- name: {{ .name }}
  hostPath:
    path: {{ .values.hostPath | quote }}
    type: Directory
{{- else if eq .values.source "objectStore" }}
- name: {{ .name }}
  emptyDir:
    sizeLimit: {{ .values.objectStore.sizeLimit | quote }}
{{- else if eq .values.source "image" }}
- name: {{ .name }}
  image:
    reference: {{ include "topwork.registry" (dict "root" .root "image" .values.image.reference) | quote }}
    pullPolicy: {{ .values.image.pullPolicy }}
{{- end }}
{{- end }}

{{- define "topwork.volumes" -}}
{{- include "topwork.sourceVolume" (dict "root" .root "name" "model" "values" .root.Values.model) }}
{{- include "topwork.sourceVolume" (dict "root" .root "name" "adapters" "values" .root.Values.adapters) }}
{{- with .root.Values.apiKeys }}
{{- if .secretName }}
- name: keys
  secret:
    secretName: {{ .secretName | quote }}
    items:
      - key: {{ .key | quote }}
        path: keys.yaml
{{- end }}
{{- end }}
{{- with .root.Values.tokenRules }}
{{- if .configMapName }}
- name: rules
  configMap:
    name: {{ .configMapName | quote }}
    items:
      - key: {{ .key | quote }}
        path: rules.yaml
{{- end }}
{{- end }}
{{- if include "topwork.keepsKernels" . }}
{{- include "topwork.kernelCacheVolume" .root }}
{{- end }}
{{- include "topwork.tlsVolumes" .root }}
- name: probe
  configMap:
    name: {{ include "topwork.fullname" .root }}-probe
# The root is read-only: Ray, HAProxy and Triton write here.
- name: tmp
  emptyDir: {}
- name: home
  emptyDir: {}
- name: shared-memory
  emptyDir:
    medium: Memory
    sizeLimit: {{ .group.sharedMemory | quote }}
{{- with .root.Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Of pods on GPUs: what Triton compiles, if it is to outlive them; else it is in their home. */}}
{{- define "topwork.keepsKernels" -}}
{{- if and (eq .flavour "cuda") (ne .root.Values.kernelCache.source "none") }}yes{{ end }}
{{- end }}

{{- define "topwork.kernelCacheVolume" }}
{{- $values := .Values.kernelCache }}
- name: kernel-cache
{{- if eq $values.source "pvc" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-kernel-cache" (include "topwork.fullname" .)) $values.pvc.existingClaim | quote }}
{{- else }}
  hostPath:
    path: {{ $values.hostPath | quote }}
    type: Directory
{{- end }}
{{- end }}

{{/* Mounts of the container: dict "root" $ "flavour" "cuda". */}}
{{- define "topwork.mounts" -}}
{{- if include "topwork.keepsKernels" . }}
- name: kernel-cache
  mountPath: /var/cache/topwork/kernels
{{- end }}
{{- with .root }}
{{- if ne .Values.model.source "hub" }}
- name: model
  mountPath: {{ .Values.model.mountPath | quote }}
  readOnly: true
{{- end }}
{{- if ne .Values.adapters.source "none" }}
- name: adapters
  mountPath: {{ .Values.adapters.mountPath | quote }}
  readOnly: true
{{- end }}
{{- if .Values.apiKeys.secretName }}
- name: keys
  mountPath: /etc/topwork/keys
  readOnly: true
{{- end }}
{{- if .Values.tokenRules.configMapName }}
- name: rules
  mountPath: /etc/topwork/rules
  readOnly: true
{{- end }}
{{- include "topwork.tlsMount" . }}
- name: probe
  mountPath: /etc/topwork/probe
  readOnly: true
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/topwork
- name: shared-memory
  mountPath: /dev/shm
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* A download before a pod starts; the settings of the remote come from its secret. */}}
{{- define "topwork.download" -}}
{{- if eq .values.source "objectStore" }}
- name: download-{{ .name }}
  image: {{ include "topwork.registry" (dict "root" .root "image" .values.objectStore.image) | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [rclone]
  args: [copy, --config=, --checksum, --retries=10, {{ .values.objectStore.source | quote }}, {{ .values.mountPath | quote }}]
  {{- with .values.objectStore.credentialsSecret }}
  envFrom:
    - secretRef:
        name: {{ . | quote }}
  {{- end }}
  securityContext:
    {{- toYaml .root.Values.securityContext | nindent 4 }}
  resources:
    requests: {cpu: 200m, memory: 256Mi}
    limits: {memory: 1Gi}
  volumeMounts:
    - name: {{ .name }}
      mountPath: {{ .values.mountPath | quote }}
    - name: tmp
      mountPath: /tmp
{{- end }}
{{- end }}

{{- define "topwork.initContainers" -}}
{{- include "topwork.download" (dict "root" . "name" "model" "values" .Values.model) }}
{{- include "topwork.download" (dict "root" . "name" "adapters" "values" .Values.adapters) }}
{{- include "topwork.tlsInit" . }}
{{- end }}
